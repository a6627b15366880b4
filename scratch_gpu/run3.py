"""python scratch_gpu/run1.py check I N OUT | time OUT SECONDS"""
import importlib.util, json, os, random, statistics, sys, time, traceback
import torch
from flexattn.bench import shapes
from flexattn.bench.implementations import problem_of
from flexattn.bench.inputs import make_tensors
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd
from flexattn.kernels_triton import backward, forward, hopper_backward, hopper_forward, hopper_one_pass
from flexattn.kernels_triton.configs import HOPPER_FORWARD, HOPPER_ONE_PASS, HopperTile
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_dout, make_inputs, reference_attention, reference_gradients

def load_old(name):
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), name + ".py"))
    m = importlib.util.module_from_spec(spec); sys.modules[name] = m; spec.loader.exec_module(m); return m
old, old_split, old_one = (load_old(n) for n in ("old_hopper_forward", "old_hopper_backward", "old_hopper_one_pass"))

def f(d, m, n, st, reg, q=1, oq=False, dv=None): return HopperTile(d, dv or d, m, n, st, reg, q, oq, 0, 0, 0, 0, 0, 0)

FWD = {
    64: {"old": f(64,192,128,2,160), "192x128": f(64,192,128,2,160), "256x64": f(64,256,64,4,112), "256x64 q2": f(64,256,64,4,112,2), "192x64 q2": f(64,192,64,4,160,2), "128x128": f(64,128,128,2,240)},
    128: {"old": f(128,128,128,2,240), "q1": f(128,128,128,2,240), "q2": f(128,128,128,2,240,2)},
    192: {"old": f(192,128,128,2,240,1,True,128), "new": f(192,128,128,2,240,1,True,128)},
    256: {"old": f(256,128,64,2,240,1,True), "new": f(256,128,64,2,240,1,True)},
}
BWD = {d: {"old": old_one.one_pass_backward, "new": hopper_one_pass.one_pass_backward} for d in (64, 128)}
def fwd_of(name): return old if name == "old" else hopper_forward

BANDS = {"open": {}, "causal": {"attn_mask_type": "causal"}, "window": {"attn_mask_type": "causal", "window_size": (100, 0)},
         "ragged": {"attn_mask_type": "padding_causal"}}
UNEVEN = {"lengths_q": [300, 0, 1, 700, 129, 260], "lengths_kv": [300, 0, 1, 700, 129, 260], "qkv_format": "thd"}
DENSE = {"lengths_q": [700, 700], "lengths_kv": [700, 700]}

def combos():
    for dim, variants in BWD.items():
        for name, tile in variants.items():
            for band in BANDS:
                if dim == 64 and band == "ragged": continue
                yield "bwd", dim, name, tile, band
    for dim, tiles in FWD.items():
        for name, tile in tiles.items():
            for band in BANDS:
                if (dim > 128 and band in ("window", "ragged")) or (dim == 64 and band == "ragged"): continue
                yield "fwd", dim, name, tile, band
    for dim in FWD:
        for band in ("open", "causal"): yield "split", dim, "split", hopper_backward.hopper_backward, band
        for band in ("open", "causal"): yield "split", dim, "old split", old_split.hopper_backward, band
    for dim in (64, 128):
        for band in ("open", "causal", "window"): yield "portable", dim, "portable", None, band
    yield "portable", 128, "portable long", None, "causal"

def check(one, file):
    kind, dim, name, tile, band = one
    began = time.monotonic(); status = "ok"
    try:
        dv = 128 if dim == 192 else dim
        call = dict(BANDS[band])
        inputs = dict(UNEVEN if band == "ragged" else DENSE)
        if name == "portable long": inputs = {k: [max(0, 2 * n - 200) for n in v] if isinstance(v, list) else v for k, v in inputs.items()}
        sink = dim == 64 and band == "window"
        if sink: call |= {"softmax_type": "learnable", "softmax_offset": torch.tensor([0.5, -2.0, 1.0, 0.0], device="cuda")}
        given = make_inputs(**{"dtype": torch.bfloat16, "device": "cuda", "head_dim_qk": dim, "head_dim_v": dv, "num_heads": 4, "num_heads_kv": 2, **inputs})
        spec, x = make_call(given, **call, return_max_logit=False)
        problem = triton_backend._problem(spec, x)
        exact, same = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
        if kind == "fwd":
            out = torch.full((*x.q.shape[:-1], dv), float("nan"), dtype=x.q.dtype, device="cuda")
            lse = torch.full_like(exact[1], float("nan"), dtype=torch.float32)
            for _ in range(5):
                fwd_of(name).hopper_forward(problem, as_bshd(out, spec.q_format), lse, tile=tile)
                for n, got, want, budget in zip(("out", "lse"), (out, lse), exact, same): check_close(n, got, want, budget)
        elif kind in ("bwd", "split"):
            out, lse = exact[0].to(x.q.dtype), exact[1].float().contiguous()
            dout = make_dout(given)
            wanted, budgets = reference_gradients(spec, x, dout, None), reference_gradients(spec, x, dout, None, dtype=spec.dtype)
            for _ in range(5):
                g = [torch.full_like(t, float("nan"), memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v)]
                views = [as_bshd(t, fm) for t, fm in zip(g, (spec.q_format, spec.kv_format, spec.kv_format))]
                doffset = torch.empty(spec.num_heads, device="cuda") if x.softmax_offset is not None else None
                tile(problem, as_bshd(out, spec.q_format), lse, as_bshd(dout, spec.q_format), None, *views, doffset)
                for n, got, w, bu in zip(("dq", "dk", "dv"), g, wanted, budgets): check_close(n, got, w, bu, factor=GRADIENT_FACTOR)
        else:
            out = torch.empty((*x.q.shape[:-1], dv), dtype=x.q.dtype, device="cuda"); lse = torch.empty_like(exact[1], dtype=torch.float32)
            forward.attention_forward(problem, as_bshd(out, spec.q_format), lse, None)
            if band == "ragged": return
            g = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
            doffset = torch.empty(spec.num_heads, device="cuda") if x.softmax_offset is not None else None
            if dim <= 128:
                backward.attention_backward(problem, out, lse, make_dout(given), None, *g, None, doffset)
        torch.cuda.synchronize()
    except Exception as e:
        status = f"{type(e).__name__}: {str(e)[:600]}"
    finally:
        with open(file, "a") as h: h.write(json.dumps({"case": [kind, dim, name, band], "status": status, "seconds": round(time.monotonic() - began, 1)}) + "\n")

W = shapes.WORKLOADS
CAUSAL = {"attn_mask_type": "causal"}
def sw(d, mask, s): return shapes.sweep(d, mask, s)
def win(d, s, heads, batch, left): 
    more = {"softmax_type": "learnable"} if d == 64 else {}
    return shapes.dense(f"d{d} window {left} s{s} h{heads}", "x", batch, s, heads, (d, d), **CAUSAL, window_size=(left - 1, 0), **more)
def small(d, s, batch, heads, mask):
    dv = 128 if d == 192 else d
    return shapes.dense(f"small d{d} {mask} s{s} b{batch} h{heads}", "x", batch, s, (heads, heads), (d, dv), attn_mask_type=mask)

def jobs():
    yield "fwd", 64, W["gpt-oss-window-s8192"]
    yield "fwd", 64, win(64, 8192, (64, 8), 2, 128)
    yield "fwd", 128, win(128, 8192, (32, 8), 2, 1024)
    for w in (sw(256, "full", 8192), sw(256, "causal", 8192), W["deepseek-v3-s4096"], sw(128, "causal", 8192), sw(64, "causal", 2048)): yield "split", w.head_dim_qk, w
    for s, m in ((16384, "full"), (16384, "causal"), (8192, "full"), (8192, "causal")): yield "bwd", 128, sw(128, m, s)
    for n in ("llama3-70b-s8192", "ragged-documents", "ragged-log-normal"): yield "bwd", 128, W[n]
    for s, m in ((16384, "full"), (16384, "causal"), (2048, "causal")): yield "bwd", 64, sw(64, m, s)
    yield "bwd", 64, W["gpt-oss-window-s8192"]
    for s in (512, 1024, 16384): yield "fwd", 128, sw(128, "causal", s)
    for s in (512, 16384): yield "fwd", 128, sw(128, "full", s)
    for n in ("ragged-documents", "ragged-log-normal"): yield "fwd", 128, W[n]
    for s in (1024, 8192): yield "fwd", 64, sw(64, "causal", s)
    for s in (512, 2048): yield "fwd", 64, sw(64, "full", s)
    for s, m in ((512, "causal"), (16384, "full")): yield "fwd", 256, sw(256, m, s)
    yield "fwd", 192, W["deepseek-v3-s4096"]
    for d, s, batch in ((128, 512, 32), (128, 1024, 4), (64, 1024, 16)): yield "smallbwd", d, small(d, s, batch, 16, "causal")

def time_one(calls, flush, share):
    for c in calls.values(): c()
    torch.cuda.synchronize()
    e = lambda: torch.cuda.Event(enable_timing=True)
    first = {}
    for n, c in calls.items():
        flush.zero_(); flush.zero_(); a, z = e(), e(); a.record(); c(); z.record(); first[n] = (a, z)
    torch.cuda.synchronize()
    t = max(a.elapsed_time(z) for a, z in first.values())
    rounds = int(max(5, min(40, share / (t + 0.6))))
    all_ = {n: [] for n in calls}
    for _ in range(rounds):
        for n, c in random.sample(list(calls.items()), len(calls)):
            flush.zero_(); flush.zero_(); a, z = e(), e(); a.record(); c(); z.record(); all_[n].append((a, z))
        torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(z) for a, z in v) * 1000 for n, v in all_.items()}

def peer_sdpa(q, k, v, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    def call():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return call

def peer_backward(q, k, v, dout, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (t.transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)); dout = dout.transpose(1, 2).contiguous()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]): o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)

def timing(file, seconds):
    began = time.monotonic()
    flush = torch.empty(2**30, dtype=torch.int8, device="cuda")
    from flexattn.bench.counts import work
    for kind, dim, w in jobs():
        if time.monotonic() - began > seconds: break
        try:
            t = make_tensors(w, "cuda"); problem = problem_of(w, t); q, k, v, dout = t[:4]
            out = torch.empty_like(dout); lse = torch.empty((w.num_heads, q.shape[0]) if w.is_ragged else (q.shape[0], w.num_heads, q.shape[1]), device="cuda")
            calls = {}
            plain = not w.is_ragged and w.window_size == (-1, -1) and w.softmax_type == "vanilla"
            if kind in ("fwd", "small"):
                for n, tile in FWD[dim].items(): calls[n] = lambda n=n, tile=tile: fwd_of(n).hopper_forward(problem, out, lse, tile=tile)
                if dim <= 128: calls["portable"] = lambda: forward.attention_forward(problem, out, lse, None)
                if plain and dim <= 128 and w.group_size == 1: calls["sdpa cudnn"] = peer_sdpa(q, k, v, w.is_causal)
            else:
                hopper_forward.hopper_forward(problem, out, lse)
                g = [torch.empty_like(x) for x in (q, k, v)]; do = torch.empty(w.num_heads, device="cuda") if t.softmax_offset is not None else None
                if kind == "split":
                    for n, m in (("old split", old_split), ("split", hopper_backward)): calls[n] = lambda m=m: m.hopper_backward(problem, out, lse, dout, None, *g, do)
                else:
                    for n, run in BWD[dim].items(): calls[n] = lambda run=run: run(problem, out, lse, dout, None, *g, do)
                    if plain and w.group_size == 1: calls["sdpa cudnn"] = peer_backward(q, k, v, dout, w.is_causal)
                if kind == "smallbwd": calls["portable"] = lambda: backward.attention_backward(problem, out, lse, dout, None, *g, None, do)
            us = time_one(calls, flush, 35.0)
            flops = work(w, "forward" if kind in ("fwd", "small") else "backward").flops
            row = {"kind": kind, "workload": w.name, "shape": str(w), "us": {n: round(x, 2) for n, x in us.items()}, "tflops": {n: round(flops / x / 1e6, 1) for n, x in us.items()}}
        except Exception as e:
            row = {"kind": kind, "workload": w.name, "error": f"{type(e).__name__}: {str(e)[:400]}", "where": traceback.format_exc()[-500:]}
        with open(file, "a") as h: h.write(json.dumps(row) + "\n")
        print(kind, w.name, row.get("tflops", row), flush=True)
        del t, problem, calls; torch.cuda.empty_cache()
    print("seconds", time.monotonic() - began)

if __name__ == "__main__":
    if sys.argv[1] == "check":
        i, n = int(sys.argv[2]), int(sys.argv[3])
        for one in list(combos())[i::n]: check(one, sys.argv[4])
    else: timing(sys.argv[2], float(sys.argv[3]))

"""A child of os.fork() runs calls, at any state of the parent's other threads."""

from __future__ import annotations

import os
import threading

import pytest

from flexattn.forks import fork_safe

FORK = """
import os, threading, time
import torch
from flexattn import attention

q = torch.randn(1, 4, 1, 8)
begun, done = threading.Event(), threading.Event()

def slow(score, b, h, q_idx, kv_idx):
    begun.set()
    done.wait(60)
    return score * 2.0

thread = threading.Thread(target=lambda: attention(q, q, q, score_mod=slow, backend="eager"))
thread.start()
assert begun.wait(60)  # the other thread traces a mod now
child = os.fork()
if child == 0:
    attention(q, q, q, score_mod=lambda score, b, h, q_idx, kv_idx: score + h, backend="eager")
    os._exit(7)
until = time.monotonic() + 60
while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
    time.sleep(0.02)
if found[0] == 0:
    os.kill(child, 9)
done.set()
thread.join()
print("exit", os.waitstatus_to_exitcode(found[1]) if found[0] else "never")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is there on POSIX alone")
def test_a_child_traces_a_mod_while_a_thread_of_its_parent_does(forked_python) -> None:
    run = forked_python("-c", FORK.replace("60)", "20)"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["exit", "7"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is there on POSIX alone")
@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_that_another_thread_holds_is_free_in_a_child(make) -> None:
    lock = fork_safe(make())
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(int(lock.acquire(timeout=5)))
    status = os.waitpid(child, 0)[1]
    assert not lock.acquire(timeout=0.01)  # the parent still holds its lock
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 1

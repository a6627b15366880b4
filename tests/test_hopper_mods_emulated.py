"""What the kernels of sm_90 inline: softcap, ALiBi, biases, mods and block masks, in the emulator against the oracle."""

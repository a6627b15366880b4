"""The choice of kernels: the specification of a call and the backends that can run it. Launches nothing itself."""

"""What decides: the specification of a call, the backends that can run it, and the choice among them. Launches nothing itself."""

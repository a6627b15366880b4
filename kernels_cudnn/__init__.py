"""What runs through cuDNN: graphs, their plans and their execution. It holds none yet; the dispatcher says so to who asks."""

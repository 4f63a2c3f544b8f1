"""The contestants of `benchmarks/peers.py`: each library in its own documented way, in one training loop."""

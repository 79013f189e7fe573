"""Continuous batching, pure and synchronous: sequences, blocks, scheduler, runners. No I/O, no wall clock."""

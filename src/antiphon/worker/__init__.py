"""The worker process: an engine on its own thread behind one HTTP port."""

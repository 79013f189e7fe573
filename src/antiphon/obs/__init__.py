"""What operators see: logs and metrics."""

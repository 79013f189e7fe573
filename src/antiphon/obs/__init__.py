"""Logs and metrics, each declared once."""

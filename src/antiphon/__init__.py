"""Antiphon serves chat models the way ChatGPT is served: gateway, router, workers, one command."""

__version__ = "0.1.0.dev0"

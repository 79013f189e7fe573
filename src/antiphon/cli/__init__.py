"""Commands. The only package that prints, reads argv and builds processes."""

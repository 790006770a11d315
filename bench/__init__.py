"""Measures attention on one device: `python -m bench --grid cpu`. See bench/README.md."""

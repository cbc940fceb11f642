"""Compiled PyTorch models in BentoML services."""

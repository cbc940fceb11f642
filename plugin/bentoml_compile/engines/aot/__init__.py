"""The ahead-of-time engine: torch.export and AOTInductor."""

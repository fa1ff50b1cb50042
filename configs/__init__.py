"""Data files of the package: presets, targets, model and policy files. Read through importlib.resources."""

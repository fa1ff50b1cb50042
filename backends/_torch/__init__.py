"""The torch reference."""

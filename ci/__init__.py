"""Continuous-integration tools: simulator, matrix, comparison."""

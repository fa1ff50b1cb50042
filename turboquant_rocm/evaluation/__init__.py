"""What a quantised cache does to a real model: ``python -m turboquant_rocm.evaluate``, and its parts for programs.

:mod:`.schemes`: how keys and values are kept, as functions that read them back. :mod:`.attention`: a transformers
attention over them. :mod:`.compare`: one forward pass per scheme against the unquantised cache, token by token.
:mod:`.tasks`: what is read: text, exact copying, needles. :mod:`.smollm2`: a small model from a Python package.
"""

from __future__ import annotations

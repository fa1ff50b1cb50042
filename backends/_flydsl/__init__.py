"""FlyDSL decode for gfx942 and gfx950 over 4-bit SoA caches. Design and budget: docs/flydsl_decode.md.

:mod:`.tables` (numpy) holds the key look-up tables, :mod:`.config` what a specialisation is, :mod:`.emit` the
instruction-level vocabulary of the kernels, :mod:`.decode`, :mod:`.prepare` and :mod:`.reduce` the kernels.
Only the kernel modules and :mod:`.emit` import flydsl.
"""

"""``python -m turboquant_rocm.bench``: how fast every backend is here, beside bf16 and the memory's own speed.

What is measured (:mod:`.cases`), what comes out (:mod:`.records`), what it should be (:mod:`.goals`), the search for
tile choices (:mod:`.search`), caches in a model side by side (:mod:`.ab`) and the command line load no framework.
:mod:`.measure`, :mod:`.baselines`, :mod:`.inputs`, :mod:`.timing` and :mod:`.tune` need torch, :mod:`.models`
transformers too, :mod:`.kernels` needs Triton.
"""

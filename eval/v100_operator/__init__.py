"""Evidence that the attention ops are right, and how fast they are, on the GPU at hand.

``python -m v100_operator check --op paged --library L --out F.json`` compares an op with an FP64
oracle over a table of cases, with itself (batch against single, run against run, eager against a
graph replay after every input changed), and writes what it found. ``bench`` times graph replays
and ``report`` makes tables and a plot of what it wrote; ``sanitize`` runs small cases under
compute-sanitizer. ``verify FOLDER`` says whether committed evidence still belongs to the sources of
the tree.

``check`` and ``bench`` need PyTorch and a GPU for which the library holds code, and beside that the
standard library alone, because they run on machines where nothing can be installed.
"""

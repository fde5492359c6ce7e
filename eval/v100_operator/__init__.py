"""Evidence that the attention ops are right, and how fast they are, on the GPU at hand.

``python -m v100_operator check --op paged --library L --out F.json`` compares an op with an FP64
oracle over a table of cases, with itself (batch against single, run against run, eager against a
graph replay after every input changed), and writes what it found. ``bench`` times graph replays.
``verify FOLDER`` says whether committed evidence still belongs to the sources of the tree.

Needs PyTorch and a GPU for which the library holds code; ``verify`` needs neither. Standard
library beside that, because it runs on machines where nothing can be installed.
"""

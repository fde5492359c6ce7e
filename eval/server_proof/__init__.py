"""Proof in the server: the patched vLLM on a GPU, its attention route against the stock backends.

    stage.py      collects what turns an installed stock vLLM into this release: files, hashes
    run.py        runs the engines of a part, several at once, and judges what they wrote
    engine.py     one vLLM engine in one process: seeded weights, a scenario's tasks, one JSON
    models.py     model folders, and weights with real variance so that attention decides the tokens
    reference.py  FP32 dense model with the engine's weights: what the log-probabilities should be
    judge.py      from the engines' JSON to evidence with a verdict for each claim

See docs/server-proof.md. Nothing here needs a network or a checkpoint.
"""

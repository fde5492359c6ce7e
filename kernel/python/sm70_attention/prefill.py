def prefill_attention(*a, **k):
    raise NotImplementedError

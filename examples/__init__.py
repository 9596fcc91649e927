"""Multi-agent programs on one SGLang server; `python -m examples` runs all of them."""

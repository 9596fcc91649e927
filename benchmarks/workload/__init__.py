"""Multi-agent workflows as load for any OpenAI or SGLang endpoint: made from a seed, saved, replayed, sent.

    python -m benchmarks.workload make --graph full --workflows 20 --rate 0.1 --out trace.jsonl
    python -m benchmarks.workload run --trace trace.jsonl --url http://localhost:30000 --hints

`graphs`: who reads what. `text`: spans of real text. `build`: workflows from both. `arrivals`: when they come.
`trace`: the file format. `endpoint` and `runner`: requests over HTTP, each hop as soon as its inputs are done.
"""

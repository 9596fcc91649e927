"""Serving benchmark: ours against stock SGLang under real arrivals, each arm on a server of its own (`make
bench-serving`)."""

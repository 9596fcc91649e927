"""The places where SGLang is extended; each module touches one part of it."""

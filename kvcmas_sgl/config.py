"""The operator's settings: one frozen dataclass, its flags, and its way to the child processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, get_args

RADIX_CACHE_BACKEND = "kvcmas"
_ENVIRONMENT_KEY = "KVCMAS_CONFIG"
MAX_KL = 10

Policy = Literal["gated", "always", "learn"]
EstimatorName = Literal["affine", "anchors", "mean", "nearest", "none"]
LogDecisions = Literal["off", "refused", "all"]
Backend = Literal["auto", "cpu", "triton", "flashinfer", "torch"]


class ConfigError(ValueError):
    """A setting is outside of what is allowed; the message is one sentence for the operator."""


@dataclasses.dataclass(frozen=True)
class KvcmasConfig:
    """Settings of one server. Field names are the flags' names without ``--kvcmas-``.

    Attributes
    ----------
    policy
        ``gated`` reuses a span when its predicted KL is inside ``max_kl``; ``always`` never refuses
        (benchmarks); ``learn`` always prefills and only learns.
    estimator
        Predictor of the delta for content that a role has not read: ``affine``; ``anchors``, the published method;
        ``mean`` or ``nearest`` of the past deltas; or ``none`` (rotate only).
    tau
        The published entropy gate, for ``anchors``: beyond this share of the pool's log2 a span is computed. Published:
        0.29 (MMLU), 0.32 (GSM8K), 0.34 (HumanEval). None leaves it to ``max_kl``, which holds in any case.
    rank
        Rank of predicted deltas, and of what ``anchors``, ``mean`` and ``nearest`` keep. On SmolLM2-135M 8 does as well
        as 128 (sum of KL over rotate-only's, four edges: 0.46, 0.83, 0.39, 0.36 against 0.45, 0.78, 0.37, 0.36), and
        the correction takes time in proportion.
    own_rank
        Largest rank of own deltas, measured on dense runs; 0 keeps none.
    own_energy
        Share of an own delta's energy that is kept: it gets the smallest rank that does, ``own_rank`` at most.
    min_span
        Shortest span, in tokens, that is reused or learned from.
    head
        Tokens at the start of every span that are always computed: the error of a correction is concentrated there.
        Measured on SmolLM2-135M in fp32 after 12 learned spans, KL as a share of rotate-only's without a head, on three
        edges: 0.46, 0.38, 0.80 without, 0.35, 0.28, 0.61 with 16 tokens, 0.34, 0.26, 0.60 with 32.
    auto
        Whether requests without a hint are agents too: spans are found by their content.
    max_kl
        Quality budget: largest predicted KL, in nats, of the next-token distribution for a reused span.
    check_share
        Share of reused requests that are prefilled after all in idle time, to see whether the gate's promise still
        holds. Requests on edges with few held-out pairs are always checked; 0 checks none.
    state_bytes
        Byte budget for deltas and estimator state together.
    state_dir
        Folder that keeps what was learned across restarts; None keeps nothing.
    log_decisions
        Which per-request decisions go to the log: ``off``, ``refused`` or ``all``.
    backend
        What runs corrections: ``cpu``, ``triton``, ``flashinfer``, ``torch``, or ``auto``, the fastest that works.
    allow_overrides
        Whether a request may choose its own ``policy``, ``estimator``, ``head`` and ``max_kl`` (off in production).
    """

    policy: Policy = "gated"
    estimator: EstimatorName = "affine"
    tau: float | None = None
    rank: int = 16
    own_rank: int = 64
    own_energy: float = 0.9
    min_span: int = 64
    head: int = 16
    auto: bool = False
    max_kl: float = 0.02
    check_share: float = 0.05
    state_bytes: int = 1 << 30
    state_dir: str | None = None
    log_decisions: LogDecisions = "off"
    backend: Backend = "auto"
    allow_overrides: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("policy", get_args(Policy)),
            ("estimator", get_args(EstimatorName)),
            ("log_decisions", get_args(LogDecisions)),
            ("backend", get_args(Backend)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)!r}, but must be one of {', '.join(allowed)}.")
        for name, low, high in (
            ("rank", 1, 4096),
            ("own_rank", 0, 4096),
            ("min_span", 1, 1 << 20),
            ("head", 0, 1 << 20),
            ("state_bytes", 0, 1 << 50),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{_flag(name)} is {value!r}, but must be an integer from {low} to {high}.")
        if self.tau is not None and self.estimator != "anchors":
            raise ConfigError(f"{_flag('tau')} is {self.tau!r}, but only the estimator 'anchors' has that gate.")
        for name, most, unit in (
            ("max_kl", MAX_KL, " (nats)"),
            ("check_share", 1, ""),
            ("own_energy", 1, ""),
            *((("tau", 1, ""),) if self.tau is not None else ()),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value <= most:
                raise ConfigError(f"{_flag(name)} is {value!r}, but must be a number from 0 to {most}{unit}.")
        if self.state_dir is not None and (not isinstance(self.state_dir, str) or not self.state_dir):
            raise ConfigError(f"{_flag('state_dir')} is {self.state_dir!r}, but must be the path of a folder.")
        for name in ("auto", "allow_overrides"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)!r}, but must be true or false.")

    @property
    def estimators(self) -> tuple[str, ...]:
        """Estimators that this server keeps: its own, and those that a request may choose, which must be learned."""
        return tuple(dict.fromkeys((self.estimator, "affine", "none"))) if self.allow_overrides else (self.estimator,)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> KvcmasConfig:
        """Build from names without prefix; unknown names raise `ConfigError`."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(f"unknown kvcmas setting {name!r}; known are {', '.join(sorted(known))}.")
        return cls(**values)

    def publish(self) -> None:
        """Leave the settings in this process's environment, where SGLang's child processes find them."""
        os.environ[_ENVIRONMENT_KEY] = json.dumps(dataclasses.asdict(self))

    def summary(self) -> str:
        """One line for the log: what is active."""
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))


def published_config() -> KvcmasConfig | None:
    """The settings that a parent process (or this one) published, or None."""
    text = os.environ.get(_ENVIRONMENT_KEY)
    return KvcmasConfig.from_mapping(json.loads(text)) if text else None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--enable-kvcmas`` and ``--kvcmas-*`` to SGLang's own parser."""
    default = KvcmasConfig()
    group = parser.add_argument_group("kvcmas", "Corrected reuse of spans that several agents read")
    group.add_argument("--enable-kvcmas", action="store_true", help="Let agents share the KV cache of shared spans.")

    def add(name: str, help_text: str, **kwargs: Any) -> None:
        value = getattr(default, name)
        group.add_argument(_flag(name), default=value, help=f"{help_text} (default: {value})", **kwargs)

    add(
        "policy",
        "gated: reuse inside the quality budget; always: never refuse; learn: always prefill and learn.",
        choices=get_args(Policy),
    )
    add("estimator", "Predictor of the delta for unseen content.", choices=get_args(EstimatorName))
    add("tau", "The published entropy gate of the estimator 'anchors', share of log2 of its pool.", type=float)
    add("rank", "Rank of predicted deltas.", type=int)
    add("own_rank", "Largest rank of own deltas kept on the source's nodes; 0 keeps none.", type=int)
    add("own_energy", "Share of an own delta's energy that is kept, up to that rank.", type=float)
    add("min_span", "Shortest span that is reused, tokens.", type=int)
    add("head", "First tokens of every span that are always computed.", type=int)
    group.add_argument(
        _flag("auto"),
        action="store_true",
        help="Find shared spans by their content in requests without a hint (default: off)",
    )
    add("max_kl", "Quality budget: largest predicted KL of a reused span, nats.", type=float)
    add("check_share", "Share of reused requests that are computed densely in idle time, as a check.", type=float)
    add("state_bytes", "Budget for deltas and estimator state, bytes.", type=int)
    add("state_dir", "Folder that keeps what was learned across restarts.", metavar="DIR")
    add("log_decisions", "Which decisions are logged.", choices=get_args(LogDecisions))
    add("backend", "What runs corrections; auto: the fastest that works.", choices=get_args(Backend))
    group.add_argument(
        _flag("allow_overrides"),
        action="store_true",
        help="Let a request choose its policy, estimator, head and budget; for benchmarks (default: off)",
    )


def config_from_arguments(args: argparse.Namespace) -> KvcmasConfig | None:
    """Read our flags from SGLang's parsed arguments and select our cache backend there.

    Returns None when ``--enable-kvcmas`` is absent. Ends the process with one sentence on bad values.
    """
    names = [field.name for field in dataclasses.fields(KvcmasConfig)]
    given = {name: getattr(args, f"kvcmas_{name}") for name in names if hasattr(args, f"kvcmas_{name}")}
    if not getattr(args, "enable_kvcmas", False):
        changed = [name for name, value in given.items() if value != getattr(KvcmasConfig(), name)]
        if changed:
            sys.exit(f"{_flag(changed[0])} has no effect without --enable-kvcmas: add that flag or drop this one.")
        return None
    if getattr(args, "radix_cache_backend", None) not in (None, RADIX_CACHE_BACKEND):
        sys.exit(
            f"--radix-cache-backend is {args.radix_cache_backend!r}, but --enable-kvcmas brings its own: drop one."
        )
    try:
        config = KvcmasConfig.from_mapping(given)
    except ConfigError as error:
        sys.exit(str(error))
    args.radix_cache_backend = RADIX_CACHE_BACKEND
    return config


def _flag(name: str) -> str:
    return "--kvcmas-" + name.replace("_", "-")

from __future__ import annotations

from cotenant.live.statistics import ModelCounts
from tests.live.test_metrics import filled


def test_model_counts_idle_model_has_all_keys() -> None:
    """The keys are those that Triton 2.51.0 answered for a model that had served nothing."""
    none = {"count": 0, "ns": 0}
    phases = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    assert ModelCounts("identity", "1").to_json(1e9) == {
        "name": "identity",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys(phases, none),
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def test_model_counts_filled_model_gives_tritons_statistics() -> None:
    stats = filled().to_json(1000.0)
    assert (stats["last_inference"], stats["inference_count"], stats["execution_count"]) == (1_005_012, 2, 1)
    phases = stats["inference_stats"]
    assert phases["success"] == {"count": 2, "ns": 526_000_000}
    assert phases["fail"]["count"] == 4
    assert phases["queue"] == {"count": 2, "ns": 502_000_000}
    assert phases["compute_infer"] == {"count": 2, "ns": 18_000_000}  # of each request, its whole batch
    assert stats["batch_stats"] == [
        {
            "batch_size": 2,
            "compute_input": {"count": 1, "ns": 1_000_000},
            "compute_infer": {"count": 1, "ns": 9_000_000},
            "compute_output": {"count": 1, "ns": 2_000_000},
        }
    ]

"""Commands for clusters say what is wrong with what they are given, before they ask anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import Program


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["endpoint-picker", "cotenant"], "'cotenant' is not a replica; write HOST:PORT, such as cotenant:8000"),
        (["endpoint-picker", "cotenant:0"], "'cotenant:0' is not a replica; write HOST:PORT"),
        (["endpoint-picker", "ftp://cotenant:1"], "replicas are HOST:PORT, or all of them https://HOST:PORT"),
        (["endpoint-picker", "https://a:1", "b:2"], "replicas are HOST:PORT, or all of them https://HOST:PORT"),
        (["endpoint-picker", "a:1", "--certificate=x.pem"], "--certificate and --key go together"),
        (["recommender", "--key=x.pem"], "--certificate and --key go together"),
        (["recommender"], "nothing to recommend by: name a file with --profiles, or a --state that has some"),
        (["recommender", "--state=file:x"], "'file:x' is not a store; write configmap:NAME or redis://HOST:PORT/0"),
        (["recommender", "--profiles=none.csv"], "none.csv"),
        (["device-exporter", "--recut", "--no-kubernetes"], "--recut takes the layout from Kubernetes"),
        (["share-controller", "none.toml"], "none.toml"),
        (["instance-controller", "--key=x.pem"], "--certificate and --key go together"),
        (["instance-controller", "--host=0.0.0.0"], "anyone who reaches it could create pods; set --token-file"),
        (["instance-controller", "--token-file=none.txt"], "none.txt"),
        (["scaling-controller", "none.toml"], "none.toml"),
        (["share-controller", "problem.toml", "--lease=Mine"], "'Mine' is not a name; use lower-case letters"),
    ],
)
def test_what_is_wrong_is_said(program: Program, arguments: list[str], said: str) -> None:
    answer = program(*arguments)
    assert answer.code == 1 and said in " ".join(answer.err.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--planner=best"], "unknown planner 'best'; available: score, hetsev, min"),
        (["--extender=8888"], "'8888' is not an address; write HOST:PORT, such as 0.0.0.0:8888"),
    ],
)
def test_share_controller_says_what_is_wrong_with_its_options(
    program: Program, folder: Path, options: list[str], said: str
) -> None:
    (folder / "profiles.csv").write_text("model,kind,share_pct,batch,latency_ms,memory_mib\nm,gpu,100,1,5,100\n")
    (folder / "problem.toml").write_text(
        'profiles = ["profiles.csv"]\n[[models]]\nname = "m"\nslo = "50ms"\nrate = 1\n[[devices]]\nkind = "gpu"\n'
    )
    answer = program("share-controller", "problem.toml", *options)
    assert answer.code == 1 and said in " ".join(answer.err.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prometheus=prometheus:9090"], "'prometheus:9090' is not a Prometheus server; write its URL"),
        (["--share=0"], "--share: a share of 0 % must be above 0"),
        (["--share=50"], "m: 50 % of no kind of device meets its objective; give instances a larger --share"),
        (["--launch=h200=3s"], "--launch h200=3s: write KIND=DURATION, such as gpu=30s"),
        (["--launch=gpu=soon"], "--launch gpu=soon: "),
        (["--launch=gpu=-1"], "--launch gpu=-1: '-1' is not a duration"),
        (["--launch=gpu=30", "--ca-file=none.pem"], "none.pem"),
        (["--ca-file=none.pem"], "none.pem"),
        (["--instances=i:1", "--token-file=t"], "--instances: 'i:1': a token is not sent unencrypted over a network"),
        (
            ["--prometheus=http://p:1/x", "--prometheus-token-file=t"],
            "--prometheus: 'p:1': a token is not sent unencrypted over a network; write https://, or set",
        ),
        # These go past that, and end at the certificate.
        (["--instances=i:1", "--token-file=t", "--insecure-token", "--prometheus-ca-file=none.pem"], "none.pem"),
        (["--prometheus=http://[::1]:1/x", "--prometheus-token-file=t", "--prometheus-ca-file=none.pem"], "none.pem"),
        (["--prometheus=https://p:1", "--prometheus-ca-file=none.pem"], "none.pem: cannot be used as a certificate"),
    ],
)
def test_scaling_controller_says_what_is_wrong_with_its_options(
    program: Program, folder: Path, options: list[str], said: str
) -> None:
    (folder / "profiles.csv").write_text("model,kind,share_pct,batch,latency_ms,memory_mib\nm,gpu,100,1,5,100\n")
    (folder / "problem.toml").write_text(
        'profiles = ["profiles.csv"]\n[[models]]\nname = "m"\nslo = "50ms"\nrate = 1\n[[devices]]\nkind = "gpu"\n'
    )
    answer = program("scaling-controller", "problem.toml", "--share=100", *options)
    assert answer.code == 1 and said in " ".join(answer.err.split())

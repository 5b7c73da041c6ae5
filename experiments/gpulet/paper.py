"""List the numbers of the gpulet paper (Choi et al., USENIX ATC 2022)."""

from __future__ import annotations

from itertools import product

# Table 3: the models by their short names, and their targets in ms. The order is that of the published program's files.
TARGETS_MS = {
    "le": 5,
    "goo": 66,
    "res": 108,
    "ssd": 202,
    "vgg": 142,
    "nas": 62,
    "mob": 64,
    "den": 202,
    "be": 22,
}
LARGEST_BATCH = 32  # section 3.1
DEVICES = 4  # Table 2: two servers with two RTX 2080 Ti each
CUTS_PERCENT = (20, 40, 50, 60, 80, 100)  # sections 3.4 and 5.2: 2:8, 4:6, 5:5 and whole
MAX_PARTITIONS = 2

# Section 3.2: each of nine models has one of these rates, in requests/s; all at 0 is omitted.
RATES = (0, 100, 200)
SCENARIOS = len(RATES) ** len(TARGETS_MS) - 1
assert SCENARIOS == 19_682

# Figure 5: scenarios that SBP schedules on whole GPUs, and on GPUs cut in two halves.
FIG05 = {"SBP": 5_772, "SBP on halves": 19_682}

# Section 3.3 and Figure 6: two GPUs, two models, three systems. The text gives averages only.
FIG06_DEVICES = 2
FIG06_PAIRS = (("ssd", "be"), ("res", "vgg"), ("goo", "mob"), ("nas", "den"))
FIG06_OF_SPATIAL = {"SBP": 1 / 1.51, "best fit": 1.0, "ideal": 1.23}

# Figure 13 and section 5.2: the largest rate at which 99 % of all requests meet their SLO. The text gives two bars of
# game, in requests/s; the ratios are averages over game, traffic and Table 4's scenarios.
ATTAINMENT = 0.99
FIG13_GAME = {"SBP": 690.0, "gpulet+int": 1_650.0}
FIG13_OF_SBP = {"SBP": 1.0, "best fit": 1.617 / 1.812, "gpulet": 1.617 / 1.075, "gpulet+int": 1.617}

# Figure 14 and section 5.2: whether gpulet violates the SLO of more than 1 % of requests at the largest rate that
# either variant considers schedulable, and what gpulet+int does at that rate. The text mentions no other scenarios.
FIG14 = {
    ("scen2", "gpulet"): "over 1 %",
    ("scen3", "gpulet"): "over 1 %",
    ("scen5", "gpulet"): "over 1 %",
    ("scen2", "gpulet+int"): "not schedulable",
    ("scen3", "gpulet+int"): "not schedulable",
    ("scen5", "gpulet+int"): "under 1 %",
}

# Figure 15 and section 5.2: up to eight GPUs, one in each of eight servers.
FIG15_DEVICES = 8
FIG15_SECONDS = 3_200.0

# Figure 16 and section 5.2: scenarios that ideal schedules and gpulet+int does not.
FIG16_MISSED = 520

# Figure 17 and section 5.2: of ideal's largest rate, on average over game, traffic and Table 4's scenarios.
FIG17_OF_IDEAL = {"gpulet+int": 0.926, "ideal": 1.0}

# Table 4: models with equal rates.
GROUPS = {
    "scen1": ("mob", "be", "nas", "goo"),
    "scen2": ("den", "vgg"),
    "scen3": ("mob", "res", "vgg"),
    "scen4": ("ssd", "nas", "den"),
    "scen5": ("le", "ssd", "nas", "vgg"),
}

# The same by memory: less than 1 GB, 1 to 2 GB, more than 2 GB.
TABLE04 = {
    "scen1": (("mob", "be"), ("nas", "goo"), ()),
    "scen2": ((), ("den",), ("vgg",)),
    "scen3": (("mob",), ("res",), ("vgg",)),
    "scen4": (("ssd",), ("nas", "den"), ()),
    "scen5": (("le",), ("ssd", "nas"), ("vgg",)),
}

# Figure 12 and section 5.1: how often one request of an application invokes each model. game has an SLO of 108 ms for
# models that run in parallel; traffic has 202 ms for a detector followed by two classifiers, which the program's
# scripts split into 90 and 112 ms.
GAME = {"le": 6, "res": 1}
GAME_TARGET_MS = 108
TRAFFIC_TARGET_MS = 202
TRAFFIC_TARGETS_MS = {"ssd": 90, "goo": 112, "vgg": 112}

# Table 5: what each system does. Columns: batch tuning, multi model, GPU scaling, temporal schedule, spatial schedule,
# interference prediction.

TABLE05 = {
    "Clipper": (True, True, True, True, False, False),
    "MArk": (True, False, True, False, False, False),
    "INFaaS": (True, True, True, True, False, False),
    "Nexus": (True, True, True, True, False, False),
    "GSLICE": (True, True, False, False, True, False),
    "gpulet": (True, True, True, True, True, True),
}


def scenarios() -> list[dict[str, int]]:
    """Return all 19,682 scenarios of section 3.2, numbered as by the published program.

    Each maps models to multiples of 100 requests/s.
    """
    every = product(range(len(RATES)), repeat=len(TARGETS_MS))
    return [dict(zip(TARGETS_MS, levels, strict=True)) for levels in every if any(levels)]


# Figure 7: 90 % of the slowdowns of pairs are lower. Figure 10: error of the linear model.
FIG07_P90_PERCENT = 18.0
FIG10_P90_PERCENT = 10.26
FIG10_P95_PERCENT = 13.98

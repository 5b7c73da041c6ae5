"""List the numbers of HetSev (Mo et al., Electronics 2023)."""

from __future__ import annotations

# Section 3.1 and Figure 1: instances of one model on a GPU, mean of four models.
FIG01_INSTANCES = 3
FIG01_THROUGHPUT_RATIO = 1.85  # times one instance's throughput
FIG01_UTILISATION_RATIO = 2.76  # times one instance's GPU utilisation

# Section 6.1 and Figure 5: two models share a load that goes from 200 to 1,000 requests/s in a spike at 3,500 s.
FIG05_MIX = {"ResNet50": 0.6, "Inception-v3": 0.4}
FIG05_SECONDS = 6_000.0
FIG05_SPIKE = 3_500.0
FIG05_LOW, FIG05_HIGH = 200.0, 1_000.0
FIG05_THROUGHPUT_RATIO = 2.21  # times K8S's throughput, at most
FIG05_RESPONSE_TIME_RATIO = 2.3  # times less of its response time, at most
FIG05_UTILISATION_RATIO = 2.56  # times its cluster GPU utilisation, at most

# Section 6.2 and Figure 6: three models, two waves, at most 18 instances.
FIG06_MODELS = ("ResNet50", "Inception-v3", "SSD-ResNet50")
FIG06_SECONDS = 2_500.0
FIG06_MISSED_PERCENT = 1.12  # of all requests

# Section 6.3 and Figure 7: four models, each with low load and a spike; times less cost than K8S.
FIG07_SECONDS = 3_000.0
FIG07_SAVING = {"mean": 1.79, "most": 2.15}

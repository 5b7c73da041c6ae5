"""List the numbers in the KACE report's text, as fractions of Oracle's throughput sum; bars without text are absent."""

from __future__ import annotations

# Section 6.2.2, Figure 6.3. MEMCAP: the best rule "improves upon MEMCAP by roughly 7 %" to 83.7 %.
FIG63 = {"KACE": 0.91, "Xu et al.": 0.81, "Best rule": 0.837, "MEMCAP": 0.837 / 1.07, "Random": 0.54}
# Section 6.2.4, Figure 6.5: 92 %, 11 % above Xu et al. and 16 % above rules.
FIG65 = {"KACE": 0.92, "Xu et al.": 0.92 / 1.11, "Best rule": 0.92 / 1.16}
# Section 6.1 and 7.1.1: mean squared errors of standardised sums. Two models: 0.2 with 29 pairs; three: above 0.2 with
# 56 runs, around 0.15 with more.
MSE_TWO, MSE_TWO_PAIRS = 0.2, 29
MSE_THREE = 0.15
# Section 7.1.1, Figure 7.2, linear regression: "over 96 %".
FIG72 = {"lr": 0.96}
TECHNIQUES = {"lr": "LR", "rf": "RF", "nn": "NN", "automl": "AutoML"}

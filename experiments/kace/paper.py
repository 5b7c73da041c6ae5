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

# Table 5.1: model in the data, SM busy and memory busy in percent, memory in GB, averages over batches of 2, 8 and 16.
TABLE51 = {
    "BERT-train": ("bert-base-cased-train", 97.0, 45.2, 5.1),
    "ViT-train": ("vit_h_14-train", 97.2, 37.0, 17.6),
    "ALBERT-train": ("albert-base-v2-train", 97.2, 45.1, 7.1),
    "BERT-inf": ("bert-base-cased-inf", 95.1, 38.6, 1.4),
    "ViT-inf": ("vit-base-patch16-224-inf", 28.5, 5.4, 3.2),
    "Whisper-inf": ("whisper-large-v2-inf", 44.2, 19.6, 11.7),
    "Wav2Vec2-inf": ("wav2vec2-base-960h-inf", 18.9, 6.6, 12.2),
}

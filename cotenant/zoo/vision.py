"""Build image models, layer for layer as in their papers. They take RGB images as FP32 [n, 3, height, width] unless
said."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cotenant.zoo.graph import Graph


def _image(g: Graph, side: int = 224, depth: int = 3) -> str:
    return g.input("image", "FP32", (depth, side, side))


def _classes(g: Graph, features: str, count: int = 1000) -> None:
    """Add a dense layer and its probabilities."""
    g.output(g.op("Softmax", g.dense(features, count), axis=1), "probabilities", "FP32", (count,))


def lenet(g: Graph) -> None:
    """Build LeNet-5: LeCun et al., Gradient-based learning applied to document recognition (1998), figure 2. As is
    usual today, C3 sees all maps of S2, and subsampling learns nothing."""
    x = g.conv(_image(g, 28, 1), 6, 5, pad=2, act="Tanh")
    x = g.pool(x, "Average", 2, 2)
    x = g.conv(x, 16, 5, pad=0, act="Tanh")
    x = g.pool(x, "Average", 2, 2)
    x = g.conv(x, 120, 5, pad=0, act="Tanh")
    _classes(g, g.dense(g.flatten(x), 84, "Tanh"), 10)


def vgg16(g: Graph) -> None:
    """Build VGG-16: Simonyan and Zisserman, Very deep convolutional networks (2015), table 1, column D."""
    x = _image(g)
    for channels, convs in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convs):
            x = g.conv(x, channels, 3)
        x = g.pool(x, "Max", 2, 2)
    x = g.dense(g.flatten(x), 4096, "Relu")
    _classes(g, g.dense(x, 4096, "Relu"))


def googlenet(g: Graph) -> None:
    """Szegedy et al., Going deeper with convolutions (2015), table 1 and figure 3, without the classifiers that
    only training needs."""

    def inception(x: str, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int) -> str:
        return g.concat([
            g.conv(x, one, 1),
            g.conv(g.conv(x, reduce3, 1), three, 3),
            g.conv(g.conv(x, reduce5, 1), five, 5),
            g.conv(g.pool(x, "Max", 3, 1, pad=1), pooled, 1),
        ])  # fmt: skip

    x = g.conv(_image(g), 64, 7, 2)
    x = g.lrn(g.pool(x, "Max", 3, 2, ceil=True))
    x = g.conv(g.conv(x, 64, 1), 192, 3)
    x = g.pool(g.lrn(x), "Max", 3, 2, ceil=True)
    x = inception(x, 64, 96, 128, 16, 32, 32)  # 3a
    x = inception(x, 128, 128, 192, 32, 96, 64)
    x = g.pool(x, "Max", 3, 2, ceil=True)
    x = inception(x, 192, 96, 208, 16, 48, 64)  # 4a
    x = inception(x, 160, 112, 224, 24, 64, 64)
    x = inception(x, 128, 128, 256, 24, 64, 64)
    x = inception(x, 112, 144, 288, 32, 64, 64)
    x = inception(x, 256, 160, 320, 32, 128, 128)
    x = g.pool(x, "Max", 3, 2, ceil=True)
    x = inception(x, 256, 160, 320, 32, 128, 128)  # 5a
    x = inception(x, 384, 192, 384, 48, 128, 128)
    _classes(g, g.global_pool(x))


def resnet18(g: Graph) -> None:
    """He et al., Deep residual learning (2016), table 1, 18 layers; option B for shortcuts."""

    def block(x: str, channels: int, stride: int) -> str:
        y = g.conv(g.conv(x, channels, 3, stride), channels, 3, act="", gain=1 / math.sqrt(8))
        return _residual(g, x, y, stride)

    _resnet(g, block, (2, 2, 2, 2))


def resnet50(g: Graph) -> None:
    """He et al. (2016), table 1, 50 layers. The stride of a stage is in its 3x3 convolution, as nearly everyone has
    it since (the paper has it in the 1x1 before); the parameters are the same."""

    def block(x: str, channels: int, stride: int) -> str:
        y = g.conv(g.conv(x, channels, 1), channels, 3, stride)
        return _residual(g, x, g.conv(y, 4 * channels, 1, act="", gain=0.25), stride)

    _resnet(g, block, (3, 4, 6, 3))


def _resnet(g: Graph, block: Callable[[str, int, int], str], blocks: Sequence[int]) -> None:
    x = g.pool(g.conv(_image(g), 64, 7, 2), "Max", 3, 2, pad=1)
    for stage, count in enumerate(blocks):
        for index in range(count):
            x = block(x, 64 << stage, 2 if stage and not index else 1)
    _classes(g, g.global_pool(x))


def _residual(g: Graph, x: str, y: str, stride: int) -> str:
    channels = g.shapes[y][0]
    if g.shapes[x] != g.shapes[y]:
        x = g.conv(x, channels, 1, stride, act="")
    return g.activate(g.add(x, y), "Relu")


def mobilenet_v2(g: Graph) -> None:
    """Sandler et al., MobileNetV2 (2018), table 2, width 1."""
    x = g.conv(_image(g), 32, 3, 2, act="Relu6")
    for expand, channels, repeat, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for index in range(repeat):
            x = _bottleneck(g, x, expand, channels, 3, 1 if index else stride, "Relu6")
    _classes(g, g.global_pool(g.conv(x, 1280, 1, act="Relu6")))


def mnasnet(g: Graph) -> None:
    """Tan et al., MnasNet (2019), appendix, figure 11: B1, the one without squeeze and excitation."""
    x = g.conv(_image(g), 32, 3, 2)
    for expand, channels, kernel, repeat, stride in (
        (1, 16, 3, 1, 1), (3, 24, 3, 3, 2), (3, 40, 5, 3, 2), (6, 80, 5, 3, 2), (6, 96, 3, 2, 1), (6, 192, 5, 4, 2),
        (6, 320, 3, 1, 1),
    ):  # fmt: skip
        for index in range(repeat):
            x = _bottleneck(g, x, expand, channels, kernel, 1 if index else stride, "Relu")
    _classes(g, g.global_pool(g.conv(x, 1280, 1)))


def _bottleneck(g: Graph, x: str, expand: int, channels: int, kernel: int, stride: int, act: str) -> str:
    """MobileNetV2's inverted residual (2018, table 1): expand, filter each channel, project without activation."""
    depth = g.shapes[x][0]
    y = g.conv(x, expand * depth, 1, act=act) if expand > 1 else x
    y = _depthwise(g, y, kernel, stride, act)
    if stride == 1 and depth == channels:
        return g.add(x, g.conv(y, channels, 1, act="", gain=0.3))
    return g.conv(y, channels, 1, act="")


def _depthwise(g: Graph, x: str, kernel: int, stride: int, act: str) -> str:
    depth = g.shapes[x][0]
    return g.conv(x, depth, kernel, stride, groups=depth, act=act)


def ssd_mobilenet(g: Graph) -> None:
    """MobileNetV1 (Howard et al. 2017, table 1) under SSD (Liu et al. 2016, section 2.1) at 300x300 and COCO's 90
    classes, as its authors combined them (2017, table 13): six maps, 1,917 default boxes, heads of 1x1 convolutions.

    Gives the heads as they are: four offsets to each default box, and the scores of no class and of each. There is
    no suppression of boxes that overlap."""
    x = g.conv(_image(g, 300), 32, 3, 2, act="Relu6")
    maps = []
    for channels, stride in (
        (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1),
    ):  # fmt: skip
        if (channels, stride) == (1024, 2):
            maps.append(x)
        x = g.conv(_depthwise(g, x, 3, stride, "Relu6"), channels, 1, act="Relu6")
    maps.append(x)
    for channels in (512, 256, 256, 128):
        x = g.conv(g.conv(x, channels // 2, 1, act="Relu6"), channels, 3, 2, act="Relu6")
        maps.append(x)
    for name, width in (("boxes", 4), ("scores", 91)):
        heads = []
        for index, features in enumerate(maps):
            anchors = 6 if index else 3
            head = g.op("Transpose", g.conv(features, anchors * width, 1, act=""), perm=[0, 2, 3, 1])
            heads.append(g.op("Reshape", head, g.weight(np.array([0, -1, width], np.int64))))
        joined = g.op("Concat", *heads, axis=1)
        value = g.op("Sigmoid", joined) if name == "scores" else joined
        g.output(value, name, "FP32", (1917, width))


def densenet121(g: Graph) -> None:
    """Huang et al., Densely connected networks (2017), table 1, 121 layers, growth rate 32."""
    x = g.pool(g.conv(_image(g), 64, 7, 2), "Max", 3, 2, pad=1)
    for stage, layers in enumerate((6, 12, 24, 16)):
        if stage:
            x = g.conv(g.activate(g.norm(x), "Relu"), g.shapes[x][0] // 2, 1, act="", bias=False)
            x = g.pool(x, "Average", 2, 2)
        for _ in range(layers):
            y = g.conv(g.activate(g.norm(x), "Relu"), 128, 1)
            x = g.concat([x, g.conv(y, 32, 3, act="", bias=False)])
    _classes(g, g.global_pool(g.activate(g.norm(x), "Relu")))

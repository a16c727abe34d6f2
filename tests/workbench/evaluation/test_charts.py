"""Where an evaluation's charts put their marks, and what their axes say: in a picture of 386 × 240 from (62, 12) on."""

import re

from logitless.workbench.evaluation.charts import Axis, Chart
from logitless.workbench.evaluation.page import _contexts, _correctness, _documents, _reliability

CHART = Chart(Axis("across", 0, 10), Axis("up", 0, 2))


def found(svg: str, kind: str, *names: str) -> list[tuple[float, ...]]:
    """Numbers of each mark of a kind, by their names."""
    marks = re.findall(rf'<\w+ class="{kind}"[^>]*>', svg)
    return [tuple(float(re.search(rf' {name}="([^"]*)"', mark)[1]) for name in names) for mark in marks]


def test_marks_lie_where_their_numbers_are():
    assert (CHART.at(0, 0), CHART.at(10, 2)) == ((62, 252), (448, 12))
    assert found(CHART.point(5, 0.5, ""), "point", "cx", "cy") == [(255, 192)]
    assert found(CHART.bar(5, 10, 0.5, ""), "bar", "x", "y", "width", "height") == [(255, 192, 192, 60)]
    assert 'points="62.0,252.0 448.0,12.0"' in CHART.line([(0, 0), (10, 2)])
    assert "<title>a &lt; b</title>" in CHART.point(0, 0, "a < b")


def test_what_stands_beside_an_axis():
    assert [name for _, name in Axis("", 0, 1).ticks()] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [name for _, name in Axis("", 0, 3, whole=True).ticks()] == ["0", "1", "2", "3"]
    named = Axis("", -0.5, 9.5, names="abcdefghij").ticks()
    assert named == [(i, "abcdefghij"[i]) for i in range(0, 10, 2)]  # at most eight, so that none lies on another
    assert Axis("", 3, 3).share(3) == 0  # of documents that are all alike
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]*)<', CHART.svg([], ""))
    assert ("62.0", "268.0", "middle", "0") in labels
    assert ("448.0", "268.0", "middle", "10") in labels
    assert ("56.0", "16.0", "end", "2") in labels


def test_a_bar_of_calibration_is_as_high_as_the_accuracy():
    bins = [{"from": 0.5, "to": 1.0, "tokens": 4, "confidence": 0.75, "accuracy": 0.25}]
    _, svg, _ = _reliability(bins)
    assert found(svg, "bar", "x", "y") == [(255, 192)]
    assert found(svg, "point", "cx", "cy") == [(351.5, 192)]
    assert svg.count("<title>4 tokens: confidence 0.750, accuracy 0.250</title>") == 2
    assert '<polyline class="diagonal" points="62.0,252.0 448.0,12.0"/>' in svg
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert ">probability of the best entry<" in svg


def test_accuracy_lies_over_the_mean_of_a_group():
    groups = [{"tokens": 2, "mean": mean, "accuracy": accuracy} for mean, accuracy in ((1.0, 1.0), (2.0, 0.5))]
    _, svg, said = _correctness("entropy", {"groups": groups, "auroc": 0.25})
    assert found(svg, "point", "cx", "cy") == [(240.7, 12), (419.4, 132)]  # 1.08 × the highest is at the end
    assert "the right one has the higher number 25.0% of the time" in said
    assert _correctness("entropy", {"groups": groups, "auroc": None})[2] == "All tokens are right, or all wrong."


def test_a_bar_for_each_interval_that_holds_documents():
    _, svg, _ = _documents({"edges": [1.0, 2.0, 3.0, 5.0], "documents": [3, 0, 1]})
    heights = [round(3 / 3.24 * 240, 1), round(1 / 3.24 * 240, 1)]  # 1.08 × the most is at the top
    assert found(svg, "bar", "x", "width", "height") == [(62, 95.5, heights[0]), (255, 192, heights[1])]
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == ["0", "1", "2", "3"]
    assert "<title>3.000 to 5.000: 1 document</title>" in svg


def test_contexts_are_as_far_apart_as_they_are_many():
    places = [{"from": 1, "to": 1, "nats_per_token": 2.0, "tokens": 1}]
    places.append({"from": 2, "to": 3, "nats_per_token": 1.0, "tokens": 9})
    _, svg, _ = _contexts(places)
    assert found(svg, "point", "cx", "cy") == [(158.5, 29.8), (351.5, 140.9)]
    assert "<title>2 to 3 before: 1.000 nats, 9 tokens</title>" in svg

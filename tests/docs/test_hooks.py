"""The docs build fails on a public name without an entry, and lists the decisions that exist."""

from docs import hooks


def test_a_name_without_an_entry_is_found():
    names = hooks.public_names()
    assert {"logitless.LMHead", "logitless.losses.dpo", "logitless.sample.Noise"} <= set(names)
    assert "logitless.errors.DataError" in names
    page = "".join(f'<h3 id="{name}">' for name in names if name != "logitless.losses.dpo")
    assert hooks.undocumented(page) == ["logitless.losses.dpo"]


def test_a_line_of_code_wider_than_its_column_is_found():
    html = "<p>" + "x" * 200 + "</p><pre><span></span><code><span class='n'>a</span> &lt; b\n%s</code></pre>"
    assert hooks.too_wide(html % ("<b>y</b>" * 100), 100) == []
    assert hooks.too_wide(html % ("<b>y</b>" * 101), 100) == ["y" * 101]


def test_a_name_that_is_there_twice_is_found():
    assert hooks.twice('<h3 id="logitless.score"><h3 id="logitless.memory"><h3 id="logitless.score">') == [
        "logitless.score"
    ]


def test_code_that_is_set_as_prose_is_found():
    right = "<p>Dense equivalent:</p><pre><code>loss = -p\n</code></pre><p>labels: <code>x = 1</code> counts\nk: 0</p>"
    wrong = ["loss_fn = f\nloss = g(loss_fn)", "carry: how.\n  sweeps  at once\n  none"]
    assert hooks.code_as_prose(right + "".join(f"<p>{text}</p>" for text in wrong)) == wrong


def test_decisions_are_listed_by_number(tmp_path):
    assert "None" in hooks.decisions(tmp_path)
    (tmp_path / "0002-b.md").write_text("# 0002: second\n\ntext\n", "utf-8")
    (tmp_path / "0001-a.md").write_text("# 0001: first\n", "utf-8")
    (tmp_path / "template.md").write_text("# NNNN\n", "utf-8")
    assert hooks.decisions(tmp_path) == "- [0001: first](0001-a.md)\n- [0002: second](0002-b.md)"

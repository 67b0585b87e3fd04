"""`offbeat graph`: constants, exchanges, pictures of 80 columns, and mistakes in one line."""

import json
import re
import subprocess
import sys

import networkx as nx
import pytest

from offbeat import cli
from offbeat.report.graph import circle, draw, matrix, table, torus
from offbeat.solve.graphs import constants, edge_rates, topology


def output_of(capsys, argv):
    assert cli.main(["graph", *argv.split()]) == 0
    return capsys.readouterr().out


def test_the_numbers_are_the_solvers(capsys):
    found = json.loads(output_of(capsys, "--topology star --workers 8 --rate 2 --json"))
    rates = edge_rates(topology("star", 8), 2.0)
    expected = constants(rates, 8)
    for name in ("lambda2", "chi1", "chi2", "eta", "alpha", "alpha_tilde"):
        assert found[name] == getattr(expected, name)
    assert {(i, j): rate for i, j, rate in found["edges"]} == rates
    assert found["exchanges"] == pytest.approx(sum(rates.values()))
    assert found["per_worker"] == pytest.approx([3.5, *[0.5] * 7])
    assert (found["topology"], found["workers"], found["rate"]) == ("star", 8, 2.0)


def test_the_text_names_every_constant(capsys):
    text = output_of(capsys, "--topology ring --workers 16")
    facts = dict(re.findall(r"^(\w+) +([\d.]+) ", text, re.MULTILINE))
    names = ["lambda_2", "chi1", "chi2", "eta", "alpha", "alpha_tilde", "exchanges"]
    assert list(facts) == names
    assert (facts["chi1"], facts["alpha_tilde"], facts["exchanges"]) == ("13.14", "1.872", "8")
    assert "8 " in text
    assert "1 of each worker" in text
    assert "0.5 to 3.5 of each worker" in output_of(capsys, "--topology star --workers 8 --rate 2")


def test_edges_and_seeds(capsys):
    found = json.loads(output_of(capsys, "--topology 0-1,1-2 --workers 3 --json"))
    assert [edge[:2] for edge in found["edges"]] == [[0, 1], [1, 2]]
    one, other = (
        json.loads(output_of(capsys, f"--topology random-regular --workers 12 --seed {k} --json"))
        for k in (0, 1)
    )
    assert one["edges"] != other["edges"]


def test_what_suits_the_links_of_a_cluster(capsys, tmp_path):
    """Two sites on a thin link: one edge between them is enough."""
    thin = [
        f'[[pairs]]\nhosts = [{i}, {j}]\nrates = {{net = "1mbit"}}' for i in (0, 1) for j in (2, 3)
    ]
    path = tmp_path / "sites.toml"
    path.write_text("\n".join(["hosts = 4", 'rate = "1gbit"', *thin]))
    found = json.loads(output_of(capsys, f"--topology measured --cluster {path} --json"))
    edges = {tuple(edge[:2]) for edge in found["edges"]}
    assert found["workers"] == 4
    assert {(0, 1), (2, 3)} < edges
    assert len(edges) < 6
    assert output_of(capsys, f"--topology measured --cluster {path}").startswith("measured: 4")


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        ("--workers 1", ["workers (1)"]),
        ("--topology measured", ["measured needs links", "--cluster"]),
        ("--cluster nowhere.toml", ["must come with --topology measured"]),
        ("--rate 0", ["rate (0)"]),
        ("--rate -1", ["rate (-1)"]),
        ("--rate nan", ["rate (nan)"]),
        ("--topology torus --workers 7", ["workers (7)", "6 or 8"]),
        ("--topology 0-1,2-3", ["(0, 1), (2, 3)"]),
        ("--topology 0-0,0-1 --workers 2", ["0-0", "self loops"]),
        ("--topology rings", ["'rings'"]),
    ],
)
def test_mistakes_are_one_line(argv, facts, capsys):
    assert cli.main(["graph", *argv.split()]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert [fact for fact in facts if fact not in printed.err] == []


SHAPES = ["ring", "star", "torus", "complete", "exponential", "random-regular"]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("n", [4, 8, 16, 32, 64, 500])
def test_pictures_fit_and_name_workers(name, n):
    lines = draw(topology(name, n)).split("\n")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 70
    assert all(line == line.rstrip() for line in lines)
    shown = set(re.findall(r"\d+", "\n".join(lines)))
    assert {"0", str(n // 2)} <= shown or n > 32


def test_a_circle_names_everybody_and_has_a_line_per_edge():
    ring, path = circle(nx.cycle_graph(8)), circle(nx.path_graph(8))
    for text in (ring, path):
        assert sorted(map(int, re.findall(r"\d+", text))) == list(range(8))
    assert dots(ring) == pytest.approx(dots(path) * 8 / 7, rel=0.05)


def test_the_hub_of_a_star_is_in_the_middle():
    lines = circle(nx.star_graph(7)).split("\n")
    row = next(k for k, line in enumerate(lines) if re.search(r"\b0\b", line))
    assert row == pytest.approx(len(lines) / 2, abs=1)


def test_a_table_is_the_adjacency():
    graph = nx.path_graph(3)
    assert table(graph) == "   0   2\n0  · ■ ·\n1  ■ · ■\n2  · ■ ·"


def dots(text):
    return sum((ord(letter) - 0x2800).bit_count() for letter in text if ord(letter) >= 0x2800)


@pytest.mark.parametrize("n", [40, 128])
def test_a_matrix_has_a_dot_per_pair(n):
    graph = topology("exponential", n)
    assert dots(matrix(graph)) == 2 * graph.number_of_edges()


def test_a_large_matrix_says_what_a_dot_is():
    text = matrix(topology("complete", 500))
    assert text.endswith("a dot is 4 x 4 pairs")
    assert dots(text) == 125**2


def test_a_torus_is_a_grid():
    assert torus(2, 3) == "- 0 - 1 - 2 -\n  |   |   |\n- 3 - 4 - 5 -"
    text = torus(3, 4)
    assert re.findall(r"\d+", text) == [str(i) for i in range(12)]
    assert text.count("|") == 16  # 4 more that leave below come back above
    assert text.count("-") == 15


def test_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from offbeat import cli; "
        "sys.exit(cli.main(['graph', '--workers', '4']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr

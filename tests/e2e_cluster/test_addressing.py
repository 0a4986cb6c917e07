"""The embedded cluster's addresses, against a table written by hand."""

import itertools

import pytest

from e2e.cluster import addressing


@pytest.mark.parametrize(
    ("index", "name", "node", "pods"),
    [
        (1, "node-1", "192.0.2.225", "192.0.2.32/27"),
        (2, "node-2", "192.0.2.226", "192.0.2.64/27"),
        (3, "node-3", "192.0.2.227", "192.0.2.96/27"),
    ],
)
def test_a_nodes_addresses(index: int, name: str, node: str, pods: str) -> None:
    addresses = addressing.NodeAddresses(index)
    assert (addresses.name, str(addresses.node), str(addresses.pods)) == (name, node, pods)
    assert addresses.max_pods == 29


def test_services_and_control_plane() -> None:
    assert str(addressing.API_SERVICE) == "192.0.2.129"
    assert str(addressing.DNS_SERVICE) == "192.0.2.130"
    assert addressing.api_server_url() == "https://192.0.2.254:6443"


def test_ranges_do_not_overlap() -> None:
    ranges = [addressing.SERVICES, addressing.NODES]
    ranges += [node.pods for node in addressing.nodes(addressing.MAX_NODES)]
    for left, right in itertools.combinations(ranges, 2):
        assert not left.overlaps(right)


@pytest.mark.parametrize("index", [0, 4, -1])
def test_there_is_no_such_node(index: int) -> None:
    with pytest.raises(ValueError, match="1 to 3 nodes"):
        addressing.NodeAddresses(index)

"""One configuration file, YAML or JSON, as a tree of nodes that know their place; the schema plays no part here.

Whatever is wrong with the file is returned as problems with ``path:line:column``, all that can be found in one
reading. No file makes the reading fail otherwise, hang or take up much memory.
"""

from torchturbo.config.document.files import read_document
from torchturbo.config.document.nodes import Node, Row, Scalar, Table

__all__ = ["Node", "Row", "Scalar", "Table", "read_document"]

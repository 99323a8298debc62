"""Read exported stores with the libraries that define them; run by a Python that has them.

python read_stores.py STORE.ome.zarr STORE.zarr [PICTURE.png]     prints what they hold as JSON
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def read_omezarr(path: str) -> dict[str, Any]:
    """By ome-zarr: the first level's values and what its levels say of their pixels."""
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader

    (node,) = Reader(parse_url(path))()
    first = node.data[0].compute()
    return {
        "levels": len(node.data),
        "shape": list(first.shape),
        "values": first[:, 32::64, 32::64].astype(float).tolist(),
        "axes": [axis["name"] for axis in node.metadata["axes"]],
        "scale": node.metadata["coordinateTransformations"][0][0]["scale"],
        "channels": node.metadata["channel_names"],
    }


def read_spatialdata(path: str) -> dict[str, Any]:
    """By spatialdata: the tiles joined to the table by its own keys, checked by its own models."""
    import spatialdata

    store = spatialdata.read_zarr(path)
    spatialdata.models.TableModel().validate(store["xmil_tiles"])
    spatialdata.models.ShapesModel.validate(store["tiles"])
    tiles, table = spatialdata.join_spatialelement_table(
        sdata=store, spatial_element_names=["tiles"], table_name="xmil_tiles", how="inner"
    )
    return {
        "boxes": tiles["tiles"].bounds.to_numpy().astype(int).tolist(),
        "scores": table.X.astype(float).tolist(),
        "columns": list(table.var_names),
        "centres": table.obsm["spatial"].tolist(),
        "systems": list(store.coordinate_systems),
    }


def draw(path: str, picture: str) -> dict[str, Any]:
    """The tiles in the colours of their scores by spatialdata-plot, with what it painted at their centres."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
    import spatialdata
    import spatialdata_plot  # noqa: F401  # adds .pl

    store = spatialdata.read_zarr(path)
    table = store["xmil_tiles"]
    column, most = table.var_names[0], float(abs(table.X).max())
    figure, axis = plt.subplots(figsize=(8, 4), dpi=100)
    colours = {"cmap": "RdBu_r", "norm": mpl.colors.Normalize(-most, most), "fill_alpha": 1.0}
    store.pl.render_shapes("tiles", color=column, table_name="xmil_tiles", **colours).pl.show(ax=axis)
    figure.savefig(picture, dpi=100)
    pixels = np.asarray(figure.canvas.buffer_rgba())[::-1]  # from below, as places on the figure count
    across, up = axis.transData.transform(table.obsm["spatial"]).astype(int).T
    return {"colours": pixels[up, across, :3].tolist(), "column": column}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries, about each other
        found = {"ome-zarr": read_omezarr(sys.argv[1]), "spatialdata": read_spatialdata(sys.argv[2])}
        if len(sys.argv) > 3:
            found["picture"] = draw(sys.argv[2], sys.argv[3])
    sys.stdout.write(json.dumps(found))

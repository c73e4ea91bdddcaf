"""The public image sets that can be downloaded: files, mirrors, checksums and file formats.

The checksums of MNIST, FashionMNIST, KMNIST, CIFAR-10 and SVHN are those that their authors or torchvision publish.
NotMNIST has two archives of the same images: the .zip files of Zenodo record 8274268, with the checksums of
torch-uncertainty, and the author's .tar.gz files, with the checksums of several public loaders.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

Format: TypeAlias = Literal["idx", "notmnist", "cifar10", "svhn"]
"""Idx files are read as they are; the other formats are converted to one .npz file after the download."""

IDX_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class Mirror:
    """Address of a file and its checksum."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        """Name of the file."""
        return urlsplit(self.url).path.rpartition("/")[2]

    @property
    def host(self) -> str:
        """Name of the server."""
        return urlsplit(self.url).hostname or self.url


@dataclass(frozen=True)
class CatalogueEntry:
    """An image set that can be downloaded: a description, the mirrors of each file, and the format of the files."""

    about: str
    files: tuple[tuple[Mirror, ...], ...]
    format: Format = "idx"


def idx_set(about: str, bases: tuple[str, ...], md5s: tuple[str, str, str, str]) -> CatalogueEntry:
    """Return the entry of a set of four idx.gz files with the usual names, at each of the base addresses."""
    names = (f"{name}.gz" for name in IDX_FILES.values())
    files = (tuple(Mirror(base + name, md5) for base in bases) for name, md5 in zip(names, md5s, strict=True))
    return CatalogueEntry(about, tuple(files))


def _notmnist(about: str, name: str, zip_md5: str, tar_md5: str) -> CatalogueEntry:
    zenodo = Mirror(f"https://zenodo.org/records/8274268/files/{name}.zip", zip_md5)
    author = Mirror(f"http://yaroslavvb.com/upload/notMNIST/{name}.tar.gz", tar_md5)
    return CatalogueEntry(about, ((zenodo, author),), "notmnist")


CATALOGUE: Mapping[str, CatalogueEntry] = {
    "mnist": idx_set(
        "handwritten digits, 60,000 / 10,000",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion_mnist": idx_set(
        "clothes, 60,000 / 10,000",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "kmnist": idx_set(
        "Japanese cursive, 60,000 / 10,000",
        ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
        (
            "bdb82020997e1d708af4cf47b453dcf7",
            "e144d726b3acfaa3e44228e80efcd344",
            "5c965bf0a639b31b8f53240b1b52f4d7",
            "7320c461ea6c1c855c0b718fb2a4b134",
        ),
    ),
    "notmnist": _notmnist(
        "letters A–J in many fonts, cleaned by hand, about 18,700",
        "notMNIST_small",
        "3de91fb69221d9c2d5c57387101ebc6c",
        "c9890a473a9769fda4bdf314aaf500dd",
    ),
    "notmnist_large": _notmnist(
        "letters A–J in many fonts, not cleaned, about 529,000",
        "notMNIST_large",
        "c3f9e0862df000a897766593044e366a",
        "70a95b805ecfb6592c48e196df7c1499",
    ),
    "cifar10": CatalogueEntry(
        "colour photographs of ten classes, 50,000 / 10,000",
        ((Mirror("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),),
        "cifar10",
    ),
    "svhn": CatalogueEntry(
        "colour photographs of house numbers, 73,257 / 26,032",
        (
            (Mirror("http://ufldl.stanford.edu/housenumbers/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),),
            (Mirror("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),),
        ),
        "svhn",
    ),
}

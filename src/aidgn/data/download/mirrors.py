"""Where data sets can be downloaded: their copies in order of preference, and the steps for a person."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aidgn.data.download.http import File
from aidgn.data.registry import DATASETS, DatasetInfo


@dataclass(frozen=True)
class Mirror:
    """One copy of a data set."""

    title: str  # name in messages
    files: tuple[File, ...] = ()  # what to download
    arrange: str = "folders"  # name of the function in layouts.py that arranges the files as a data set
    names: Mapping[str, str] = field(default_factory=dict)  # the copy's own names of domains and classes, with ours
    listing: str = ""  # address of the Hugging Face API that lists parquet files, in place of `files`
    resolve: str = ""  # address below which these files are
    note: str = ""  # how the copy differs from the published data set


@dataclass(frozen=True)
class Source:
    """Where a data set can be downloaded."""

    info: DatasetInfo
    mirrors: tuple[Mirror, ...]  # its copies in order of preference
    unpacked: int  # bytes of all images, roughly; archives with more than twice as much are refused
    page: str  # web page for people
    by_hand: str = ""  # what a person must do with the files, if unpacking is not enough


def drive(name: str, identity: str, digest: str = "", resource_key: str = "") -> File:
    """Describe a file on Google Drive."""
    key = f"&resourcekey={resource_key}" if resource_key else ""
    return File(name, (f"https://drive.google.com/uc?export=download&id={identity}{key}",), digest=digest)


def hugging_face(repository: str, revision: str) -> Mirror:
    """Describe a data set of parquet files with the columns image, domain and label."""
    hub = "https://huggingface.co"
    return Mirror(
        f"{repository} on Hugging Face",
        arrange="parquet",
        listing=f"{hub}/api/datasets/{repository}/tree/{revision}/data",
        resolve=f"{hub}/datasets/{repository}/resolve/{revision}/",
        note="its file names differ from the original's, so splits differ from DomainBed's",
    )


PACS_DOMAINBED = drive("PACS.zip", "1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd", "md5:fd5db817f7cdafeef3bfd525aaf9b42e")
PACS_DASSL = drive(
    "pacs-dassl.zip",
    "1m4X4fROCCXMO0lRLrr6Zz9Vb3974NWhE",
    "sha256:0dc9d0176fa27c9b4504e7c2e962aebe6a79ed0c1819b84148786e590f87e102",
)
PACS = Source(
    DATASETS["PACS"],
    unpacked=300_000_000,
    page="https://dali-dl.github.io/project_iccv2017.html",
    mirrors=(
        Mirror("DomainBed's copy on Google Drive", (PACS_DOMAINBED,)),
        hugging_face("flwrlabs/pacs", "9c6f80edcd5320a55a39b1e84120dcfa25c8ce9b"),
        Mirror("Dassl's copy on Google Drive", (PACS_DASSL,)),
    ),
)

VLCS_DOMAINBED = drive("VLCS.tar.gz", "1skwblH1_okBwxWxmRsp9_qi15hyPpxg8", "md5:8870171eba660927d9668f4e515928e4")
VLCS_DOMAINS = {"CALTECH": "Caltech101", "LABELME": "LabelMe", "PASCAL": "VOC2007", "SUN": "SUN09"}
VLCS = Source(
    DATASETS["VLCS"],
    unpacked=4_000_000_000,
    page="https://github.com/facebookresearch/DomainBed",
    mirrors=(
        Mirror("DomainBed's copy on Google Drive", (VLCS_DOMAINBED,)),
        Mirror(
            "Dassl's copy on Google Drive",
            (drive("vlcs-dassl.zip", "1r0WL5DDqKfSPp9E3tRENwHaXNs1olLZd"),),
            names={**VLCS_DOMAINS, "0": "bird", "1": "car", "2": "chair", "3": "dog", "4": "person"},
            note="its images are smaller than those DomainBed uses, and their names differ",
        ),
    ),
)

OFFICE_HOME_DIGEST = "md5:b1c14819770c4448fd5b6d931031c91c"  # both copies are the same archive
OFFICE_HOME_AUTHORS = drive(
    "OfficeHomeDataset_10072016.zip",
    "0B81rNlvomiwed0V1YUxQdC1uOTg",
    OFFICE_HOME_DIGEST,
    resource_key="0-2SNWq0CDAuWOBRRBL7ZZsw",
)
OFFICE_HOME_DOMAINBED = drive("office_home.zip", "1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC", OFFICE_HOME_DIGEST)
OFFICE_HOME_TLLIB = {
    "Art.tgz": "4691878067d04755beab",
    "Clipart.tgz": "0d41e7da4558408ea5aa",
    "Product.tgz": "76186deacd7c4fa0a679",
    "Real_World.tgz": "dee961894cc64b1da1d7",
}
OFFICE_HOME = Source(
    DATASETS["OfficeHome"],
    unpacked=1_200_000_000,
    page="https://www.hemanthdv.org/officeHomeDataset.html",
    mirrors=(
        Mirror("the authors' copy on Google Drive", (OFFICE_HOME_AUTHORS,)),
        Mirror("DomainBed's copy on Google Drive", (OFFICE_HOME_DOMAINBED,)),
        hugging_face("flwrlabs/office-home", "d430d44779e929b335be368ab3456484e5de36bb"),
        Mirror(
            "TLlib's copy at Tsinghua University",
            tuple(
                File(name, (f"https://cloud.tsinghua.edu.cn/f/{identity}/?dl=1",))
                for name, identity in OFFICE_HOME_TLLIB.items()
            ),
        ),
    ),
)

LILA = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps"
LILA_AZURE = "https://lilawildlife.blob.core.windows.net/lila-wildlife/caltechcameratraps"
CAMERA_TRAPS = File(
    "eccv_18_all_images_sm.tar.gz",
    (f"{LILA}/eccv_18_all_images_sm.tar.gz",),
    size=6_492_615_601,
    digest="md5:8143c17aa2a12872b66f284ff211531f",
)
ECCV_ANNOTATIONS = File(
    "eccv_18_annotations.tar.gz",
    (f"{LILA}/eccv_18_annotations.tar.gz",),
    size=2_997_071,
    digest="md5:66a1f481b44aa1edadf75c9cfbd27aba",
)
ALL_ANNOTATIONS = File(
    "caltech_camera_traps.json.zip",
    tuple(f"{host}/labels/caltech_camera_traps.json.zip" for host in (LILA, LILA_AZURE)),
)
TERRA_INCOGNITA = Source(
    DATASETS["TerraIncognita"],
    unpacked=7_000_000_000,
    page="https://lila.science/datasets/caltech-camera-traps",
    by_hand="TerraIncognita has the images of Caltech Camera Traps at the locations 38, 43, 46 and 100 with the ten "
    "categories; an image with several categories is in several class folders.",
    mirrors=(
        Mirror(
            "LILA, images and annotations of ECCV 2018",
            (CAMERA_TRAPS, ECCV_ANNOTATIONS),
            arrange="camera_traps",
        ),
        Mirror(
            "LILA, images of ECCV 2018 and annotations of all Caltech Camera Traps",
            (CAMERA_TRAPS, ALL_ANNOTATIONS),
            arrange="camera_traps",
        ),
    ),
)


def bu(path: str, digest: str) -> File:
    """Describe a file of DomainNet at Boston University."""
    address = f"csr.bu.edu/ftp/visda/2019/multi-source/{path}"
    return File(path.rpartition("/")[2], (f"https://{address}", f"http://{address}"), digest=digest)


DOMAIN_NET_LISTS = {
    "clipart_train.txt": "b4349693a7f9c05c53955725c47ed6cb",
    "infograph_train.txt": "379b50054f4ac2018dca4f89421b92d9",
    "painting_train.txt": "7db0e7ca73ad9982f6e1f7f3ef372c0a",
    "quickdraw_train.txt": "b732ced3939ac8efdd8c0a889dca56cc",
    "real_train.txt": "8ebf02c2075fadd564705f0dc7cd6291",
    "sketch_train.txt": "1233bd18aa9a8a200bf4cecf1c34ef3e",
    "clipart_test.txt": "f5ddbcfd657a3acf9d0f7da10db22565",
    "infograph_test.txt": "779626b50869edffe8ea6941c3755c71",
    "painting_test.txt": "232b35dc53f26d414686ae579e38d9b5",
    "quickdraw_test.txt": "c1a828fdfe216fb109f1c0083a252c6f",
    "real_test.txt": "6098816791c3ebed543c71ffa11b9054",
    "sketch_test.txt": "d8a222e4672cfd585298aa14d02ea441",
}
DOMAIN_NET = Source(
    DATASETS["DomainNet"],
    unpacked=19_000_000_000,
    page="http://ai.bu.edu/M3SDA/",
    by_hand="Take the cleaned version, and only the images named in the _train.txt and _test.txt of each domain: the "
    "archives also have duplicates.",
    mirrors=(
        Mirror(
            "the authors' copy at Boston University",
            (
                bu("groundtruth/clipart.zip", "sha512:3bcfb9ec1b4061e8d5b0b887d4ebd4a708732787fc563c6dfc2d"),
                bu("infograph.zip", "sha512:47841f0d1b8606e4b02d508b250484d54f5cf04ef6c4875c6c5a39c"),
                bu("groundtruth/painting.zip", "sha512:4c98b02563075948668a298c488660fda1d1a7ed85fd69caa7985fba"),
                bu("quickdraw.zip", "sha512:127cce1dd57fc99992f8614de77d03ae8ed6af242973f7a013ec0a"),
                bu("real.zip", "sha512:751713d4592d1278b50bf69787988cfae280cabdac80ee34ec4016e"),
                bu("sketch.zip", "sha512:369b8b6d78ac61bfcc85f660d878ba5fc701524b82bbc2eb65ca9a"),
                *(bu(f"domainnet/txt/{name}", f"md5:{digest}") for name, digest in DOMAIN_NET_LISTS.items()),
            ),
            arrange="listed_folders",
        ),
        hugging_face("wltjr1007/DomainNet", "ee20570ae7a29c51571e55a9a17983f7625295d6"),
    ),
)

MNIST_HOSTS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "http://yann.lecun.com/exdb/mnist",
)
MNIST_DIGESTS = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
MNIST = tuple(
    File(name, tuple(f"{host}/{name}" for host in MNIST_HOSTS), digest=digest) for name, digest in MNIST_DIGESTS.items()
)
SHUFFLED = "shuffled with numpy's RandomState(0)"
ROTATED_MNIST, COLORED_MNIST = (
    Source(
        DATASETS[name],
        (Mirror("MNIST", MNIST, arrange=arrange, note=note),),
        unpacked=100_000_000,
        page="http://yann.lecun.com/exdb/mnist/",
        by_hand="The data set is made from the four files of MNIST and is not published as images.",
    )
    for name, arrange, note in (
        ("RotatedMNIST", "rotated_mnist", f"made from MNIST as DomainBed does, by bilinear rotation; {SHUFFLED}"),
        ("ColoredMNIST", "colored_mnist", f"made from MNIST as DomainBed does, in 28 x 28 pixels; {SHUFFLED}"),
    )
)

SOURCES = {
    source.info.name: source
    for source in (PACS, VLCS, OFFICE_HOME, TERRA_INCOGNITA, DOMAIN_NET, ROTATED_MNIST, COLORED_MNIST)
}

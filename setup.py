"""Put recipes and configs inside the wheel, as rlhf_trl/recipes and rlhf_trl/configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rlhf_trl*"]), "rlhf_trl.recipes", "rlhf_trl.configs"],
    package_dir={"rlhf_trl.recipes": "recipes", "rlhf_trl.configs": "configs"},
)

"""The sixteen environments: models, physics, rewards, batches. Where possible, numbers are computed in another way."""

import gc
import math
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import get_args

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import dynashift
from dynashift import models, states, tasks
from dynashift.errors import UserError
from dynashift.scores import normalized_score

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
ROBOTS = ("halfcheetah", "hopper", "walker2d", "ant")
SHIFTS = ("none", "gravity", "kinematic", "morph")
ALL = [(robot, shift) for robot in ROBOTS for shift in SHIFTS]
OBS_DIM = {"halfcheetah": 17, "hopper": 11, "walker2d": 17, "ant": 27}
ACT_DIM = {"halfcheetah": 6, "hopper": 3, "walker2d": 6, "ant": 8}
NQ = {"halfcheetah": 9, "hopper": 6, "walker2d": 9, "ant": 15}
NV = {"halfcheetah": 9, "hopper": 6, "walker2d": 9, "ant": 14}
ROOT_DIM = {"halfcheetah": 1, "hopper": 1, "walker2d": 1, "ant": 2}
ENGINE = tuple(int(part) for part in mujoco.__version__.split(".")[:2])

each_robot = pytest.mark.parametrize("robot", ROBOTS)
each_env = pytest.mark.parametrize(("robot", "shift"), ALL)
examples = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _elsewhere(tmp_path_factory):
    """Work outside the project, because MuJoCo leaves a log file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield


@pytest.fixture
def no_hang():
    """A test that waits for another process fails after a minute instead of hanging."""

    def too_long(*_):
        pytest.fail("still waiting after a minute")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@cache
def shared_env(robot, shift="none", **options):
    """Made once; only for tests that begin by setting the state."""
    return dynashift.make(robot, shift, **options).unwrapped


@cache
def model_of(robot, shift="none", physics="corrected"):
    """Made once; only for tests that do not write to it."""
    return models.build_model(robot, shift, physics)


def without_pairs(robot, shift):
    """Corrected model for which MuJoCo itself looks for the pairs of geoms that touch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_contact_pairs", lambda spec: None)
        return models.build_model(robot, shift)


def random_actions(robot, *shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (*shape, ACT_DIM[robot]))


def start_states(robot, model, n, seed=0):
    """States beside the reference pose, near the ground, moving."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        qpos = model.qpos0 + rng.uniform(-0.3, 0.3, model.nq)
        qpos[ROOT_DIM[robot]] -= 0.1
        if robot == "ant":
            qpos[3:7] /= np.linalg.norm(qpos[3:7])
        yield qpos, rng.normal(0, 1, model.nv)


def open_loop(model, qpos, qvel, actions, step=mujoco.mj_step, nstep=4):
    """States [T, nq + nv] and, of every step, the pairs of geoms in contact."""
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = qpos, qvel
    states, contacts = [], []
    for action in actions:
        data.ctrl[:] = action
        step(model, data, nstep)
        states.append(np.concatenate((data.qpos, data.qvel)))
        contacts.append([tuple(sorted(data.contact.geom[i])) for i in range(data.ncon)])
    return np.array(states), contacts


# ------------------------------------------------------------------------------------------------ gymnasium


@each_env
@pytest.mark.filterwarnings("ignore:.*(Box observation space|not within the observation space|unwrapped).*")
def test_gymnasium_finds_nothing_to_complain_about(robot, shift):
    check_env(dynashift.make(robot, shift).unwrapped, skip_render_check=True)


@each_env
def test_gymnasium_knows_the_environment_by_name(robot, shift):
    name = {"halfcheetah": "HalfCheetah", "hopper": "Hopper", "walker2d": "Walker2d", "ant": "Ant"}[robot]
    env = gymnasium.make(f"dynashift/{name}-{shift}-v0")
    assert (env.unwrapped.env, env.unwrapped.shift) == (robot, shift)
    assert env.spec.max_episode_steps == 1000
    assert env.observation_space == gymnasium.spaces.Box(-np.inf, np.inf, (OBS_DIM[robot],), np.float64)
    assert env.action_space == gymnasium.spaces.Box(-1, 1, (ACT_DIM[robot],), np.float32)
    obs, _ = env.reset(seed=1)
    assert obs in env.observation_space
    assert env.unwrapped.dt == pytest.approx(0.05 if robot in ("halfcheetah", "ant") else 0.008, rel=1e-12)


def test_importing_the_package_is_enough_to_register():
    code = (
        "import gymnasium, dynashift; print(gymnasium.make('dynashift/Hopper-morph-v0').unwrapped.model.body_mass[1])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert float(run.stdout) == pytest.approx(25.77088, abs=6e-6), run.stderr


def test_an_episode_is_cut_at_step_1000():
    env = dynashift.make("halfcheetah", "kinematic", seed=0)
    flags = [env.step(np.zeros(6))[2:4] for _ in range(1000)]
    assert flags == [(False, False)] * 999 + [(False, True)]


def test_make_with_a_seed_is_reset_with_it():
    env, again = dynashift.make("walker2d", "morph", seed=5), dynashift.make("walker2d", "morph")
    obs, _ = again.reset(seed=5)
    again.action_space.seed(5)
    np.testing.assert_array_equal(np.concatenate((env.unwrapped.data.qpos[1:], env.unwrapped.data.qvel)), obs)
    np.testing.assert_array_equal(env.action_space.sample(), again.action_space.sample())
    other, _ = again.reset(seed=6)
    assert (other != obs).all()


def test_full_ant_observation_ends_in_84_zeros():
    short, full = dynashift.make("ant", "gravity"), dynashift.make("ant", "gravity", full_ant_observation=True)
    batch = dynashift.make_batch("ant", "gravity", n=2, full_ant_observation=True)
    assert full.observation_space.shape == (111,)
    assert batch.obs_dim == 111
    pairs = [(short.reset(seed=3)[0], full.reset(seed=3)[0], batch.reset([3, 4])[0])]
    for action in random_actions("ant", 10):
        pairs.append((short.step(action)[0], full.step(action)[0], batch.step([action, action])[0][0]))
    for a, b, c in pairs:
        np.testing.assert_array_equal(b, np.concatenate((a, np.zeros(84))))
        np.testing.assert_array_equal(b, c)
    assert shared_env("hopper", full_ant_observation=True).observation_space.shape == (11,)  # for ant only


@each_robot
def test_a_wrong_action_is_refused(robot):
    env = dynashift.make(robot, seed=0)
    for shape in [(), (1,), (ACT_DIM[robot] + 1,), (1, ACT_DIM[robot])]:
        with pytest.raises(ValueError, match="shape"):
            env.step(np.zeros(shape))
    for bad in (np.nan, np.inf):
        action = np.zeros(ACT_DIM[robot])
        action[-1] = bad
        with pytest.raises(ValueError, match="NaN or infinite") as error:
            env.step(action)
        assert isinstance(error.value, UserError)  # in a script the policy has diverged: one line


@pytest.mark.parametrize("make", [dynashift.make, dynashift.make_batch, models.build_model])
@pytest.mark.parametrize(("robot", "shift"), [("hoper", "none"), ("hopper", "moprh"), ("", ""), ("ant", "friction")])
def test_an_unknown_environment_is_an_error_that_lists_all(make, robot, shift):
    wrong, known = (f"--shift {shift}", SHIFTS) if robot in ROBOTS else (f"--env {robot}", ROBOTS)
    with pytest.raises(ValueError, match=f"^{wrong} is unknown; give ") as error:
        make(robot, shift)
    assert all(name in str(error.value) for name in known)


@pytest.mark.parametrize("make", [dynashift.make, dynashift.make_batch, models.build_model])
def test_an_unknown_physics_is_an_error_that_lists_both(make):
    with pytest.raises(ValueError, match='"corrected" or "stock", not "modern"'):
        make("hopper", "none", physics="modern")


# ------------------------------------------------------------------------------------------------ rendering


DRAW = """
import sys, dynashift, mujoco, numpy as np
frames = {}
def draw(robot, shift, **options):
    env = dynashift.make(robot, shift, seed=0, render_mode="rgb_array", **options)
    frames[shift] = env.render()
    return env
draw("hopper", "morph").close()
draw("hopper", "gravity", width=900, height=600).close()
env = draw("hopper", "none")
frames["none again"] = env.render()
model, data = env.unwrapped.model, env.unwrapped.data
data.qpos[0] = 15
mujoco.mj_forward(model, data)
frames["far"] = env.render()
model.geom_rgba[1:, 3] = 0  # all but the floor
frames["far, unseen"] = env.render()
np.savez(sys.argv[1], **frames)
"""


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """Pictures made in a process without screen or settings, where a crash of OpenGL ends no other test."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM"):
        environ.pop(name, None)
    probe = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'))"  # without the code under test
    for library in ("egl", "osmesa"):
        command = [sys.executable, "-c", probe]
        if subprocess.run(command, env={**environ, "MUJOCO_GL": library}, capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("no OpenGL library can be loaded; on Debian or Ubuntu install libegl1 or libosmesa6")
    path = tmp_path_factory.mktemp("frames") / "frames.npz"
    run = subprocess.run([sys.executable, "-c", DRAW, str(path)], env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with np.load(path) as file:
        return dict(file)


def changed(a, b):
    """Share of pixels that differ to the eye."""
    return (np.abs(a.astype(int) - b).max(-1) > 40).mean()


def test_rendering_needs_neither_a_screen_nor_options(frames):
    for shift in ("none", "morph"):
        assert (frames[shift].shape, frames[shift].dtype) == ((480, 480, 3), np.uint8)
        assert 20 < frames[shift].mean() < 235
        assert frames[shift].std() > 10


def test_a_picture_may_be_larger_than_mujocos_buffer(frames):
    frame = frames["gravity"]  # the buffer has 640 x 480 unless the model says otherwise
    assert frame.shape == (600, 900, 3)
    assert frame[:, 700:].std() > 10


def test_a_morph_is_seen(frames):
    np.testing.assert_array_equal(frames["none"], frames["none again"])
    assert changed(frames["none"], frames["morph"]) > 0.01


def test_the_camera_follows(frames):
    assert changed(frames["far"], frames["far, unseen"]) > 0.01


# ------------------------------------------------------------------------------------------------ models

# Masses of the bodies, each named by one of its geoms, as the engine that recorded the data had them.
# fmt: off
MASSES = {
    ("halfcheetah", "none"): {"torso": 6.36031, "bthigh": 1.53525, "bshin": 1.58094, "bfoot": 1.06919,
                              "fthigh": 1.42559, "fshin": 1.17885, "ffoot": 0.84987},
    ("halfcheetah", "morph"): {"torso": 8.44701, "bthigh": 0.28, "bshin": 1.48365, "bfoot": 1.12869,
                               "fthigh": 0.28, "fshin": 1.25195, "ffoot": 1.12869},
    ("hopper", "none"): {"torso_geom": 3.53429, "thigh_geom": 3.92699, "leg_geom": 2.71434, "foot_geom": 5.08938},
    ("hopper", "morph"): {"torso_geom": 25.77088, "thigh_geom": 2.46301, "leg_geom": 2.71434, "foot_geom": 5.08938},
    ("walker2d", "none"): {"torso_geom": 3.53429, "thigh_geom": 3.92699, "leg_geom": 2.71434, "foot_geom": 2.94053,
                           "thigh_left_geom": 3.92699, "leg_left_geom": 2.71434, "foot_left_geom": 2.94053},
    ("walker2d", "morph"): {"torso_geom": 3.53429, "thigh_geom": 0.43197, "leg_geom": 3.94584, "foot_geom": 2.94053,
                            "thigh_left_geom": 3.92699, "leg_left_geom": 2.71434, "foot_left_geom": 2.94053},
    ("ant", "none"): {"torso_geom": 0.32725,
                      "aux_1_geom": 0.03648, "left_leg_geom": 0.03648, "left_ankle_geom": 0.06491,
                      "aux_2_geom": 0.03648, "right_leg_geom": 0.03648, "right_ankle_geom": 0.06491,
                      "aux_3_geom": 0.03648, "back_leg_geom": 0.03648, "third_ankle_geom": 0.06491,
                      "aux_4_geom": 0.03648, "rightback_leg_geom": 0.03648, "fourth_ankle_geom": 0.06491},
}
# fmt: on
MASSES["ant", "morph"] = MASSES["ant", "none"] | {"left_ankle_geom": 0.02226, "right_ankle_geom": 0.02226}
TOTAL = {
    ("halfcheetah", "none"): 14,
    ("halfcheetah", "morph"): 14,
    ("hopper", "none"): 15.264999,
    ("hopper", "morph"): 36.037602,
    ("walker2d", "none"): 22.698007,
    ("walker2d", "morph"): 20.434489,
    ("ant", "none"): 0.87871,
    ("ant", "morph"): 0.793407,
}


@each_env
def test_masses_are_those_of_the_recording_engine(robot, shift):
    model = model_of(robot, shift)
    key = robot, "morph" if shift == "morph" else "none"
    bodies = {model.geom(geom).bodyid.item(): mass for geom, mass in MASSES[key].items()}
    assert sorted(bodies) == list(range(1, model.nbody))
    for body, mass in bodies.items():
        assert model.body_mass[body] == pytest.approx(mass, abs=5.1e-6)
    assert model.body_mass.sum() == pytest.approx(TOTAL[key], abs=5.1e-7)
    stock = model_of(robot, shift, "stock").body_mass
    assert np.abs(model.body_mass - stock)[1:].max() > 0.005 * stock.max()  # today's engine has others


def geom_points(model, geom, density):
    """Point masses that have the mass, centre and inertia of a geom: quadrature of its volume, exact for polynomials.

    A capsule is a cylinder of length 2 half_length + radius, which is what old engines took it for.
    """
    nodes, weights = np.polynomial.legendre.leggauss(6)
    radius, half_length = model.geom_size[geom, :2]
    angle = 2 * np.pi * np.arange(12) / 12
    r, w_r = radius * (nodes + 1) / 2, radius * weights / 2
    if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_SPHERE:
        r, cosine, phi = np.meshgrid(r, nodes, angle, indexing="ij")
        sine = np.sqrt(1 - cosine**2)
        xyz = np.stack((r * sine * np.cos(phi), r * sine * np.sin(phi), r * cosine), -1)
        mass = (w_r[:, None, None] * weights[:, None] * np.ones(12)) * r**2 * 2 * np.pi / 12
    else:
        reach = half_length + radius / 2
        r, z, phi = np.meshgrid(r, reach * nodes, angle, indexing="ij")
        xyz = np.stack((r * np.cos(phi), r * np.sin(phi), z), -1)
        mass = (w_r[:, None, None] * reach * weights[:, None] * np.ones(12)) * r * 2 * np.pi / 12
    w, x, y, z = model.geom_quat[geom]
    rotation = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
    return density * mass.ravel(), xyz.reshape(-1, 3) @ rotation.T + model.geom_pos[geom]


def legacy_bodies(robot, shift):
    """{body: (mass, centre, 3 x 3 inertia about it, in the body's axes)} from point masses."""
    model = model_of(robot, shift, "stock")
    bodies = {}
    for body in range(1, model.nbody):
        geoms = np.flatnonzero(model.geom_bodyid == body)
        parts = [geom_points(model, geom, 5 if robot == "ant" else 1000) for geom in geoms]
        mass, xyz = (np.concatenate(part) for part in zip(*parts, strict=True))
        centre = mass @ xyz / mass.sum()
        x = xyz - centre
        inertia = (mass * (x * x).sum(1)).sum() * np.eye(3) - (mass[:, None] * x).T @ x
        bodies[body] = mass.sum(), centre, inertia
    scale = 14 / sum(mass for mass, _, _ in bodies.values()) if robot == "halfcheetah" else 1
    return {body: (scale * mass, centre, scale * inertia) for body, (mass, centre, inertia) in bodies.items()}


@each_robot
@pytest.mark.parametrize("shift", ["none", "morph"])
def test_inertias_are_those_of_cylinders_by_numerical_integration(robot, shift):
    model = model_of(robot, shift)
    for body, (mass, centre, inertia) in legacy_bodies(robot, shift).items():
        rotation = np.zeros(9)
        mujoco.mju_quat2Mat(rotation, model.body_iquat[body])
        rotation = rotation.reshape(3, 3)
        assert model.body_mass[body] == pytest.approx(mass, rel=1e-12)
        np.testing.assert_allclose(model.body_ipos[body], centre, atol=1e-12)
        ours = rotation @ np.diag(model.body_inertia[body]) @ rotation.T
        np.testing.assert_allclose(ours, inertia, rtol=1e-9, atol=1e-9 * np.trace(inertia))


@each_robot
@pytest.mark.parametrize("shift", ["none", "morph"])
def test_a_model_compiled_from_explicit_inertias_moves_the_same_way(robot, shift):
    """Masses given to the compiler, not written into the compiled model: no derived constant was forgotten."""
    spec = mujoco.MjSpec.from_file(str(models.ASSETS / tasks.ROBOTS[robot].xml))
    for edit in tasks.SHIFTS[shift][robot].edits:
        models.apply_edit(spec, *edit)
    models._contact_pairs(spec)
    spec.compiler.inertiafromgeom = mujoco.mjtInertiaFromGeom.mjINERTIAFROMGEOM_FALSE
    spec.compiler.settotalmass = -1
    for body, (mass, centre, inertia) in zip(spec.bodies[1:], legacy_bodies(robot, shift).values(), strict=True):
        body.explicitinertial, body.mass, body.ipos = True, mass, centre
        body.fullinertia = inertia[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]
    expected, model = spec.compile(), model_of(robot, shift)
    for name in ("body_mass", "body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0", "actuator_acc0"):
        np.testing.assert_allclose(getattr(model, name), getattr(expected, name), rtol=1e-8, atol=1e-12, err_msg=name)
    assert model.stat.meaninertia == pytest.approx(expected.stat.meaninertia, rel=1e-8)
    for qpos, qvel in start_states(robot, model, 3):
        actions = random_actions(robot, 10)
        ours, theirs = (open_loop(m, qpos, qvel, actions)[0] for m in (model, expected))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@each_env
def test_gravity(robot, shift):
    assert model_of(robot, shift).opt.gravity.tolist() == [0, 0, -4.905 if shift == "gravity" else -9.81]


DEGREE = math.pi / 180
RANGES = {
    "halfcheetah": {"bthigh": (-0.0052, 0.0105)},
    "hopper": {"thigh_joint": (-0.15 * DEGREE, 0), "foot_joint": (-18 * DEGREE, 18 * DEGREE)},
    "walker2d": {"foot_joint": (-0.45 * DEGREE, 0.45 * DEGREE)},
    "ant": {"hip_1": (-0.3 * DEGREE, 0.3 * DEGREE), "hip_2": (-0.3 * DEGREE, 0.3 * DEGREE)},
}


def arrays(model):
    return {name: getattr(model, name) for name in dir(model) if isinstance(getattr(model, name), np.ndarray)}


@each_robot
def test_gravity_and_kinematic_shifts_change_nothing_else(robot):
    none, gravity, kinematic = (arrays(model_of(robot, shift)) for shift in ("none", "gravity", "kinematic"))
    assert len(none) > 100
    assert [name for name in none if not np.array_equal(none[name], gravity[name])] == []
    assert [name for name in none if not np.array_equal(none[name], kinematic[name])] == ["jnt_range"]
    model, expected = model_of(robot, "kinematic"), none["jnt_range"].copy()
    for joint, limits in RANGES[robot].items():
        expected[model.joint(joint).id] = limits
    np.testing.assert_allclose(kinematic["jnt_range"], expected, rtol=1e-12)


def _along(x, z, angle, distance):
    """The point so far from (x, z) along an axis that is turned from the vertical about y."""
    return x + distance * math.sin(angle), 0, z + distance * math.cos(angle)


# Capsules in the reference pose, in the world: one end, the other end, radius. First those of "none", for contrast.
# fmt: off
CAPSULES = {
    ("walker2d", "none"): {
        "thigh_geom": ((0, 0, 1.05), (0, 0, 0.6), 0.05),
        "leg_geom": ((0, 0, 0.6), (0, 0, 0.1), 0.04),
        "foot_geom": ((0, 0, 0.1), (0.2, 0, 0.1), 0.06),
    },
    ("walker2d", "morph"): {
        "thigh_geom": ((0, 0, 1.05), (0, 0, 1.045), 0.05),
        "leg_geom": ((0, 0, 1.045), (0, 0, 0.3), 0.04),
        "foot_geom": ((0, 0, 0.3), (0.2, 0, 0.3), 0.06),
        "thigh_left_geom": ((0, 0, 1.05), (0, 0, 0.6), 0.05),
        "leg_left_geom": ((0, 0, 0.6), (0, 0, 0.1), 0.04),
        "foot_left_geom": ((0, 0, 0.1), (0.2, 0, 0.1), 0.06),
    },
    ("halfcheetah", "morph"): {
        "torso": ((-0.5, 0, 0.7), (0.5, 0, 0.7), 0.046),
        "bthigh": ((-0.5, 0, 0.7), (-0.5001, 0, 0.6999), 0.046),
        "bshin": ((-0.5001, 0, 0.6999), (-0.6301, 0, 0.5499), 0.046),
        "fthigh": ((0.5, 0, 0.7), (0.5001, 0, 0.7001), 0.046),
        "fshin": ((0.5001, 0, 0.7001), (0.5101, 0, 0.5401), 0.046),
        # the feet keep their centre in the body and their direction; half lengths are 0.07 for both
        "bfoot": (_along(-0.6001, 0.4529, -0.27, -0.07), _along(-0.6001, 0.4529, -0.27, 0.07), 0.046),
        "ffoot": (_along(0.5551, 0.4701, -0.6, -0.07), _along(0.5551, 0.4701, -0.6, 0.07), 0.046),
    },
    ("hopper", "morph"): {
        "torso_geom": ((0, 0, 1.45), (0, 0, 1.05), 0.125),
        "thigh_geom": ((0, 0, 1.05), (0, 0, 0.6), 0.04),
        "leg_geom": ((0, 0, 0.6), (0, 0, 0.1), 0.04),
        "foot_geom": ((-0.13, 0, 0.1), (0.26, 0, 0.1), 0.06),
    },
    ("ant", "none"): {"left_ankle_geom": ((0.4, 0.4, 0.75), (0.8, 0.8, 0.75), 0.08)},
    ("ant", "morph"): {
        "left_leg_geom": ((0.2, 0.2, 0.75), (0.4, 0.4, 0.75), 0.08),
        "left_ankle_geom": ((0.4, 0.4, 0.75), (0.5, 0.5, 0.75), 0.08),
        "right_ankle_geom": ((-0.4, 0.4, 0.75), (-0.5, 0.5, 0.75), 0.08),
        "third_ankle_geom": ((-0.4, -0.4, 0.75), (-0.8, -0.8, 0.75), 0.08),
        "fourth_ankle_geom": ((0.4, -0.4, 0.75), (0.8, -0.8, 0.75), 0.08),
    },
}
# fmt: on


@pytest.mark.parametrize(("robot", "shift"), CAPSULES)
@pytest.mark.parametrize("physics", ["corrected", "stock"])
def test_capsules_end_where_the_table_of_facts_says(robot, shift, physics):
    model = model_of(robot, shift, physics)
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    for name, (start, end, radius) in CAPSULES[robot, shift].items():
        geom = data.geom(name)
        half = model.geom(name).size[1] * geom.xmat.reshape(3, 3)[:, 2]
        ends = sorted([tuple(geom.xpos - half), tuple(geom.xpos + half)])
        np.testing.assert_allclose(ends, sorted([start, end]), atol=1e-9, err_msg=name)
        assert model.geom(name).size[0] == radius


def test_the_joints_of_the_morphed_walker_sit_at_the_ends_of_its_leg():
    model = model_of("walker2d", "morph")
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    z = {name: data.xanchor[model.joint(name).id, 2] for name in ("leg_joint", "foot_joint", "leg_left_joint")}
    assert z == pytest.approx({"leg_joint": 1.045, "foot_joint": 0.3, "leg_left_joint": 0.6}, abs=1e-9)


@pytest.mark.parametrize("physics", ["corrected", "stock"])
def test_friction_of_the_walkers_feet(physics):
    model = model_of("walker2d", "none", physics)
    data = mujoco.MjData(model)
    data.qpos[1] -= 0.05  # into the floor
    mujoco.mj_forward(model, data)
    floor, touched = model.geom("floor").id, {}
    for contact in data.contact:
        assert floor in contact.geom
        touched[model.geom(max(contact.geom)).name] = contact.friction[0]
    assert touched == {"foot_geom": 0.9, "foot_left_geom": 1.9}


# ------------------------------------------------------------------------------------------------ contacts, integrator


def contacts_of(model, data, qpos):
    """All that MuJoCo reports about the contacts in a pose."""
    data.qpos[:] = qpos
    mujoco.mj_kinematics(model, data)
    mujoco.mj_collision(model, data)
    fields = ("geom", "dim", "dist", "pos", "frame", "includemargin", "friction", "solref", "solreffriction", "solimp")
    return [getattr(data.contact, field).copy() for field in fields]


@each_robot
@pytest.mark.parametrize("shift", ["none", "morph"])
def test_written_contact_pairs_are_those_mujoco_finds(robot, shift):
    written, found = model_of(robot, shift), without_pairs(robot, shift)
    assert written.npair == {"halfcheetah": 8, "hopper": 4 + 3, "walker2d": 7, "ant": 13}[robot]
    assert found.npair == 0
    if ENGINE >= (3, 5) and robot in ("hopper", "ant"):
        pytest.skip("from MuJoCo 3.5 on, the pairs that it finds have another margin")
    rng, touched, floor = np.random.default_rng(0), set(), written.geom("floor").id
    pairs = [(model, mujoco.MjData(model)) for model in (written, found)]
    for _ in range(300):
        pose = written.qpos0 + rng.uniform(-2.5, 2.5, written.nq)
        ours, theirs = (contacts_of(*pair, pose) for pair in pairs)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
        touched.update(tuple(sorted(pair)) for pair in ours[0].tolist())
    assert len([pair for pair in touched if floor in pair]) == len(MASSES[robot, shift]) + (robot == "halfcheetah")
    assert len([pair for pair in touched if floor not in pair]) == (3 if robot == "hopper" else 0)


@each_robot
@pytest.mark.parametrize("shift", ["none", "morph"])
def test_written_contact_pairs_change_no_trajectory(robot, shift):
    if ENGINE >= (3, 5) and robot in ("hopper", "ant"):
        pytest.skip("from MuJoCo 3.5 on, the pairs that it finds have another margin")
    written, found = model_of(robot, shift), without_pairs(robot, shift)
    floor, touched = written.geom("floor").id, set()
    for k, (qpos, qvel) in enumerate(start_states(robot, written, 6)):
        if robot == "hopper" and k >= 3:  # folded, so that it touches itself
            qpos[3:6] = -2.34, -2.54, 0.62
        actions = random_actions(robot, 60, seed=k)
        ours, contacts = open_loop(written, qpos, qvel, actions)
        theirs, their_contacts = open_loop(found, qpos, qvel, actions)
        assert np.isfinite(ours).all()
        np.testing.assert_array_equal(ours, theirs)
        assert contacts == their_contacts
        touched.update(pair for pairs in contacts for pair in pairs)
    assert any(floor in pair for pair in touched)
    assert any(floor not in pair for pair in touched) == (robot == "hopper")  # no other robot can touch itself


@pytest.mark.parametrize(("robot", "margin"), [("hopper", 0.001), ("ant", 0.01), ("walker2d", 0), ("halfcheetah", 0)])
def test_contact_margins_are_the_larger_of_two_on_every_engine(robot, margin):
    model = model_of(robot, "none")
    data = mujoco.MjData(model)
    data.qpos[ROOT_DIM[robot]] -= {"ant": 0.5, "halfcheetah": 0.3}.get(robot, 0.05)
    mujoco.mj_forward(model, data)
    assert data.ncon > 0
    assert {contact.includemargin for contact in data.contact} == {margin}


@pytest.mark.parametrize("robot", ["hopper", "ant"])
def test_legacy_rk4_is_the_integrator_of_mujoco_3(robot):
    if ENGINE >= (4, 0) and robot == "ant":
        pytest.skip("from MuJoCo 4 on, its own integrator does something else for free joints")
    model, touched = model_of(robot, "morph"), 0
    for k, (qpos, qvel) in enumerate(start_states(robot, model, 5)):
        actions = random_actions(robot, 10, seed=k)
        ours, contacts = open_loop(model, qpos, qvel, actions, step=models.legacy_rk4, nstep=1)
        theirs, _ = open_loop(model, qpos, qvel, actions, nstep=1)
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)
        touched += sum(map(len, contacts))
    assert touched > 0


def test_legacy_rk4_keeps_time_and_leaves_x_one_stage_old():
    model = model_of("ant", "none")
    data = [mujoco.MjData(model) for _ in range(2)]
    for d, step in zip(data, (models.legacy_rk4, mujoco.mj_step), strict=True):
        d.qvel[:] = np.linspace(-1, 1, model.nv)
        step(model, d, 5)
    assert data[0].time == pytest.approx(0.05)
    assert data[0].xpos[1, 0] == pytest.approx(data[1].xpos[1, 0], rel=1e-10 if ENGINE < (4, 0) else 1e-3)
    assert data[0].xpos[1, 0] != data[0].qpos[0]


# ------------------------------------------------------------------------------------------------ against gymnasium

GYMNASIUM = {
    "halfcheetah": ("HalfCheetah-v5", {}),
    "hopper": ("Hopper-v5", {}),
    "walker2d": ("Walker2d-v5", {"xml_file": "walker2d.xml"}),
    "ant": ("Ant-v5", {"contact_cost_weight": 0, "include_cfrc_ext_in_observation": False}),
}


@each_robot
def test_stock_physics_is_gymnasiums(robot):
    name, options = GYMNASIUM[robot]
    theirs = gymnasium.make(name, **options).unwrapped
    ours = dynashift.make(robot, "none", physics="stock").unwrapped
    actions, seed, ends = random_actions(robot, 200).astype(np.float32), 0, 0
    obs = None
    for action in actions:
        if obs is None:
            obs, expected = ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0].copy()
            if robot == "ant":  # gymnasium leaves the quaternion at any length
                expected[1:5] /= np.linalg.norm(expected[1:5])
                mujoco.mj_resetData(theirs.model, theirs.data)
                theirs.set_state(ours.data.qpos, ours.data.qvel)
            np.testing.assert_array_equal(obs, expected)
        obs, reward, terminated, _, _ = ours.step(action)
        expected, their_reward, their_end, _, _ = theirs.step(action)
        np.testing.assert_array_equal(obs, expected)
        assert terminated == their_end
        missing = 1 if terminated else 0  # gymnasium does not pay for being healthy in the terminal step
        assert reward == pytest.approx(their_reward + missing, rel=1e-6, abs=1e-6)  # it sums squares in float32
        if terminated:
            obs, seed, ends = None, seed + 1, ends + 1
    assert (ends > 0) == (robot != "halfcheetah")


def test_corrected_physics_is_not_gymnasiums():
    for robot in ROBOTS:
        a, b = dynashift.make(robot, seed=0), dynashift.make(robot, seed=0, physics="stock")
        action = random_actions(robot)
        assert np.abs(a.step(action)[0] - b.step(action)[0]).max() > 1e-4


# ------------------------------------------------------------------------------------------------ rewards, health


def plain_healthy(robot, state):
    state = [float(number) for number in state]
    if robot == "halfcheetah":
        return True
    if robot == "ant":
        return all(math.isfinite(number) for number in state) and 0.2 <= state[2] <= 1.0
    z, pitch = state[1], state[2]
    if robot == "walker2d":
        return 0.8 < z < 2.0 and -1 < pitch < 1
    return z > 0.7 and -0.2 < pitch < 0.2 and all(-100 < number < 100 for number in state[2:])


def plain_observation(robot, state):
    observed = [float(number) for number in state[ROOT_DIM[robot] :]]
    if robot in ("hopper", "walker2d"):
        observed[-NV[robot] :] = [min(max(v, -10.0), 10.0) for v in observed[-NV[robot] :]]
    return observed


edges = [math.nextafter(edge, side) for edge in (0.2, 0.7, 0.8, 1.0, 2.0, 100.0) for side in (0, edge, 999)]
number = st.sampled_from(edges + [-b for b in edges]) | st.floats(-3, 3)
rare = st.sampled_from([0.0, 99.0, 100.0, -100.0, 1e6, math.nan]) | st.floats(-12, 12)


@each_robot
@examples
@given(data=st.data())
def test_health_and_observation_follow_the_plain_rules(robot, data):
    start = data.draw(st.lists(number, min_size=3, max_size=3))
    rest = NQ[robot] + NV[robot] - 3
    usual = st.sampled_from([-0.15, 0.0, 0.1, 0.5])
    state = np.array(start + data.draw(st.lists(usual | rare, min_size=rest, max_size=rest)))
    assert states.is_healthy(robot, state) == plain_healthy(robot, state)
    np.testing.assert_array_equal(states.observe(robot, state, NV[robot]), plain_observation(robot, state))
    rows = np.array([state, np.zeros_like(state), state[::-1]])
    assert states.is_healthy(robot, rows).tolist() == [plain_healthy(robot, row) for row in rows]


def test_the_plain_rules_meet_both_answers():
    for robot, some in {
        "hopper": ([0, 1.2, 0], [0, 0.7, 0], [0, 1.2, 0.2], [0, math.nan, 0]),
        "walker2d": ([0, 1.2, 0], [0, 0.8, 0], [0, 2, 0], [0, 1.2, -1]),
        "ant": ([0, 0, 0.2], [0, 0, 1.001], [math.inf, 0, 0.5], [0, 0, math.nan]),
    }.items():
        padded = [state + [0] * (NQ[robot] + NV[robot] - 3) for state in some]
        assert [plain_healthy(robot, state) for state in padded] == [True, False, False, False]
        assert states.is_healthy(robot, np.array(padded)).tolist() == [True, False, False, False]


CTRL_COST = {"halfcheetah": 0.1, "hopper": 0.001, "walker2d": 0.001, "ant": 0.5}


def random_observation(robot, data):
    """Near enough to the reference pose to be simulated, far enough to be unhealthy at times."""
    reference = model_of(robot).qpos0[ROOT_DIM[robot] :]
    noise = data.draw(st.lists(st.floats(-0.25, 0.25), min_size=len(reference), max_size=len(reference)))
    speed = data.draw(st.lists(st.floats(-5, 5), min_size=NV[robot], max_size=NV[robot]))
    obs = np.concatenate((reference + noise, speed))
    if robot == "ant":
        obs[1:5] /= np.linalg.norm(obs[1:5])
    return obs


@each_robot
@examples
@given(data=st.data())
def test_step_pays_and_ends_by_the_plain_rules(robot, data):
    env = shared_env(robot, "morph")
    obs = random_observation(robot, data)
    action = np.array(data.draw(st.lists(st.floats(-1, 1), min_size=ACT_DIM[robot], max_size=ACT_DIM[robot])))
    twin = mujoco.MjData(env.model)  # stepped by hand
    twin.qpos[ROOT_DIM[robot] :], twin.qvel[:] = np.split(env.set_observation(obs), [-NV[robot]])
    mujoco.mj_forward(env.model, twin)
    dt = (0.01 * 5) if robot in ("halfcheetah", "ant") else (0.002 * 4)
    twin.ctrl[:] = action
    for _ in range(5 if robot in ("halfcheetah", "ant") else 4):
        (models.legacy_rk4 if robot == "ant" and ENGINE >= (4, 0) else mujoco.mj_step)(env.model, twin)
    x = twin.body("torso").xpos[0] if robot == "ant" else twin.qpos[0]
    alive = 0 if robot == "halfcheetah" else 1
    expected = float(x) / dt + alive - CTRL_COST[robot] * math.fsum(float(a) ** 2 for a in action)

    next_obs, reward, terminated, truncated, _ = env.step(action)
    state = [*twin.qpos, *twin.qvel]
    assert reward == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert terminated == (not plain_healthy(robot, state))
    assert not truncated
    np.testing.assert_array_equal(next_obs, plain_observation(robot, state))


@pytest.mark.parametrize(("robot", "place", "speed"), [("hopper", 1, 8.0), ("walker2d", 1, 9.0), ("ant", 0, 9.0)])
def test_the_terminal_step_pays_for_being_healthy(robot, place, speed):
    env = shared_env(robot, "none")
    edge = {"hopper": 0.19, "walker2d": 0.99, "ant": 0.99}[robot]
    obs = np.concatenate((model_of(robot).qpos0[ROOT_DIM[robot] :], np.zeros(NV[robot])))
    obs[place] = edge
    obs[-NV[robot] + 2] = speed  # of pitch, or of z for ant
    env.set_observation(obs)
    x = env.x_before
    _, reward, terminated, _, info = env.step(np.zeros(ACT_DIM[robot]))
    assert terminated
    assert reward - (info["x"] - x) / env.dt == pytest.approx(1, abs=1e-9)


# ------------------------------------------------------------------------------------------------ set_observation


@each_robot
@examples
@given(data=st.data())
def test_an_observation_that_is_set_is_read_back(robot, data):
    env, nv, root = shared_env(robot, "gravity"), NV[robot], ROOT_DIM[robot]
    width = data.draw(st.sampled_from([np.float64, np.float32]))
    most = 9.75 if robot in ("hopper", "walker2d") else 60
    position = st.lists(st.floats(-3, 3, width=32), min_size=NQ[robot] - root, max_size=NQ[robot] - root)
    velocity = st.lists(st.floats(-most, most, width=32), min_size=nv, max_size=nv)
    obs = np.array(data.draw(position) + data.draw(velocity), width)
    if robot == "ant":
        obs[1:5] += width(0.5) * (np.linalg.norm(obs[1:5]) < 0.1)
    expected = obs.astype(np.float64)
    if robot == "ant":
        expected[1:5] /= math.sqrt(sum(q * q for q in expected[1:5].tolist()))
    given_obs = np.concatenate((obs, np.zeros(84, width))) if robot == "ant" and data.draw(st.booleans()) else obs
    before = given_obs.copy()
    back = env.set_observation(given_obs)
    np.testing.assert_array_equal(given_obs, before)
    np.testing.assert_allclose(back, expected, rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(back, np.concatenate((env.data.qpos[root:], env.data.qvel)))
    assert (env.data.qpos[:root] == 0).all()
    if robot != "ant":
        np.testing.assert_array_equal(back, expected)


@each_robot
def test_setting_an_observation_forgets_what_was_before(robot):
    env, fresh = dynashift.make(robot, "kinematic", seed=0).unwrapped, dynashift.make(robot, "kinematic").unwrapped
    obs = env.reset(seed=1)[0]
    for action in random_actions(robot, 20):
        env.step(action)
    env.set_observation(obs)
    fresh.set_observation(obs)
    for action in random_actions(robot, 5, seed=1):
        a, b = env.step(action), fresh.step(action)
        np.testing.assert_array_equal(a[0], b[0])
        assert a[1:] == b[1:]


@pytest.mark.parametrize("robot", ["hopper", "walker2d"])
@pytest.mark.parametrize("velocity", [10.0, -10.0, 11.0])
def test_a_clipped_velocity_is_refused_unless_allowed(robot, velocity):
    env = shared_env(robot)
    obs = env.reset(seed=0)[0]
    obs[-2] = velocity
    with pytest.raises(ValueError, match=r"clipped at 10.*allow_clipped=True"):
        env.set_observation(obs)
    back = env.set_observation(obs, allow_clipped=True)
    assert env.data.qvel[-2] == velocity
    assert back[-2] == np.clip(velocity, -10, 10)
    batch = dynashift.make_batch(robot, n=1)
    with pytest.raises(ValueError, match="clipped at 10"):
        batch.set_observations(obs[None])
    np.testing.assert_array_equal(batch.set_observations(obs[None], allow_clipped=True)[0], back)


@each_robot
def test_an_impossible_observation_is_refused(robot):
    env, batch = shared_env(robot), dynashift.make_batch(robot, n=2)
    obs = env.reset(seed=0)[0]
    for wrong in (obs[:-1], np.append(obs, 0), obs[None], np.float64(0), np.zeros(110), np.zeros(0)):
        with pytest.raises(ValueError, match=f"{robot} has {OBS_DIM[robot]}.* numbers, not shape"):
            env.set_observation(wrong)
    for value in (math.nan, math.inf):
        wrong = obs.copy()
        wrong[-1] = value
        with pytest.raises(ValueError, match="NaN or infinite"):
            env.set_observation(wrong)
        with pytest.raises(ValueError, match="NaN or infinite"):
            batch.set_observations([obs, wrong])
    with pytest.raises(ValueError, match="2 simulators need 2 observations, not 3"):
        batch.set_observations([obs] * 3)


def test_a_quaternion_of_length_zero_is_refused():
    with pytest.raises(ValueError, match="quaternion"):
        shared_env("ant").set_observation(np.zeros(27))


# ------------------------------------------------------------------------------------------------ recorded data


def recorded(robot, shift):
    """100 pairs of consecutive recorded transitions, the state of the first one known. Arrays [100, 2, ...]."""
    h5py = pytest.importorskip("h5py")
    if shift == "none":
        path = DATA / "d4rl_medium" / f"{robot}_medium-v2.slice.hdf5"
    else:
        path = DATA / "target" / f"{robot}_{shift}{'_0.5' if shift == 'gravity' else ''}_expert.hdf5"
    if not path.exists():
        pytest.skip(f"no recorded data: {path} is absent")
    with h5py.File(path) as file:
        names = ("observations", "actions", "next_observations", "rewards", "terminals")
        obs, action, next_obs, reward, terminal = (file[name][:].astype(np.float64) for name in names)
    reward, terminal = reward.ravel(), terminal.ravel().astype(bool)
    obs, next_obs = obs[:, : OBS_DIM[robot]], next_obs[:, : OBS_DIM[robot]]
    clip = 10 if robot in ("hopper", "walker2d") else np.inf
    usable = (np.abs(obs[:, -NV[robot] :]) < clip).all(1)[:-1] & (next_obs[:-1] == obs[1:]).all(1) & ~terminal[:-1]
    first = np.random.default_rng(0).choice(np.flatnonzero(usable), 100, replace=False)
    both = first[:, None] + [0, 1]
    return obs[both], action[both], next_obs[both], reward[both], terminal[both]


@each_env
def test_recorded_transitions_are_reproduced(robot, shift):
    """Each pair: set the state, take both actions. It is the second reward that is compared, since at the first step of
    ant the recording's x was already one integrator stage old."""
    obs, action, next_obs, reward, terminal = recorded(robot, shift)
    env, other = shared_env(robot, shift), shared_env(robot, "none" if shift != "none" else "gravity")
    state_error, reward_error, other_error = [], [], []
    for i in range(len(obs)):
        env.set_observation(obs[i, 0])
        reached, _, terminated, _, _ = env.step(action[i, 0])
        assert terminated == terminal[i, 0]
        state_error.append(np.abs(reached - next_obs[i, 0]).max())
        _, paid, terminated, _, _ = env.step(action[i, 1])
        assert terminated == terminal[i, 1]
        reward_error.append(abs(paid - reward[i, 1]))
        other.set_observation(obs[i, 0])
        other_error.append(np.abs(other.step(action[i, 0])[0] - next_obs[i, 0]).max())
    assert np.median(state_error) <= 1e-6
    assert np.quantile(state_error, 0.95) <= 1e-4
    assert np.median(reward_error) <= 1e-6
    assert np.median(other_error) > 1e-2  # in another environment they are not


@pytest.mark.parametrize(("robot", "shift"), [("hopper", "morph"), ("ant", "morph")])
def test_a_batch_reproduces_recorded_transitions_alike(robot, shift):
    obs, action, next_obs, _, _ = (column[:10, 0] for column in recorded(robot, shift))
    batch, env = dynashift.make_batch(robot, shift, n=10, workers=1), shared_env(robot, shift)
    batch.set_observations(obs)
    reached, reward, _, _ = batch.step(action)
    assert np.median(np.abs(reached - next_obs).max(1)) <= 1e-6
    for i in range(10):
        env.set_observation(obs[i])
        one, paid, *_ = env.step(action[i])
        np.testing.assert_array_equal(one, reached[i])
        assert paid == reward[i]


# ------------------------------------------------------------------------------------------------ batches

STEPS, SEEDS = 60, [7, 0, 3, 2**31, 11, 12, 13, 14, 15, 16, 17, 18]


def play_one(robot, shift, seed, actions):
    """What a batch should return for one simulator, played in a single environment."""
    env = dynashift.make(robot, shift)
    rows = [(env.reset(seed=seed)[0], 0.0, False, False)]
    for action in actions:
        over = rows[-1][2] or rows[-1][3]
        rows.append((rows[-1][0], 0.0, *rows[-1][2:]) if over else env.step(action)[:4])
    return [np.array(column) for column in zip(*rows, strict=True)]


def play_batch(batch, seeds, actions):
    n = len(seeds)
    rows = [(batch.reset(seeds), np.zeros(n), np.zeros(n, bool), np.zeros(n, bool))]
    rows += [batch.step(action) for action in actions]
    return [np.stack(column, 1) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("robot", "shift"), [("halfcheetah", "morph"), ("hopper", "kinematic"), ("walker2d", "gravity"), ("ant", "morph")]
)
def test_a_batch_is_its_simulators_bit_for_bit_for_any_number_of_workers(robot, shift, no_hang):
    actions = random_actions(robot, STEPS, len(SEEDS))
    singles = [play_one(robot, shift, seed, actions[:, i]) for i, seed in enumerate(SEEDS)]
    expected = [np.stack(column) for column in zip(*singles, strict=True)]
    for workers in (1, 2, 3) if robot == "hopper" else (1, 2):
        batch = dynashift.make_batch(robot, shift, n=len(SEEDS), workers=workers)
        assert len(batch._helpers) == workers - 1
        for repeat in range(2):  # the second time in used simulators
            for ours, theirs in zip(play_batch(batch, SEEDS, actions), expected, strict=True):
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours, theirs, err_msg=f"workers={workers}, repeat={repeat}")
        batch.close()
    assert expected[2].any() == (robot in ("hopper", "walker2d"))  # some episodes did end


def test_one_number_seeds_all():
    batch = dynashift.make_batch("walker2d", n=3)
    np.testing.assert_array_equal(batch.reset(5), batch.reset([5, 6, 7]))
    np.testing.assert_array_equal(batch.reset(np.int64(5)), batch.reset(np.array([5, 6, 7])))


def test_an_ended_episode_stays_ended_until_reset(no_hang):
    batch = dynashift.make_batch("hopper", "morph", n=8, workers=2)
    start = batch.reset(0)
    ended_at, last = np.full(8, -1), {}
    for t, action in enumerate(random_actions("hopper", 150, 8)):
        action[batch.done] = np.nan  # it is ignored
        obs, reward, terminated, truncated = batch.step(action)
        assert not truncated.any()
        for i in range(8):
            if ended_at[i] >= 0:
                np.testing.assert_array_equal(obs[i], last[i])
                assert reward[i] == 0.0
                assert terminated[i]
            elif terminated[i]:
                ended_at[i], last[i] = t, obs[i]
                assert reward[i] != 0
    assert (ended_at >= 0).all()
    assert len(set(ended_at)) > 1
    np.testing.assert_array_equal(batch.steps, ended_at + 1)
    np.testing.assert_array_equal(batch.reset(0), start)
    assert not batch.done.any()
    assert (batch.steps == 0).all()
    obs, reward, terminated, _ = batch.step(np.zeros((8, 3)))
    assert (obs != start).any(1).all()
    assert not terminated.any()
    assert (reward > 0.5).all()
    batch.close()


def test_a_batch_is_cut_at_step_1000():
    batch = dynashift.make_batch("halfcheetah", n=2, workers=1)
    batch.reset(0)
    flags = np.array([batch.step(np.zeros((2, 6)))[3] for _ in range(1000)])
    assert not flags[:999].any()
    assert flags[999].all()
    state = batch.step(np.ones((2, 6)))
    assert (state[1] == 0).all()
    assert not state[2].any()
    assert state[3].all()


def test_some_simulators_start_again_while_the_others_go_on(no_hang):
    actions, rest = random_actions("ant", 12, 8), np.array([0, 2, 3, 4, 5, 7])
    whole, parts = (dynashift.make_batch("ant", n=8, workers=workers) for workers in (1, 2))
    expected = play_batch(whole, range(8), actions)
    for only in ([1, 6], np.array([1, 6]), np.isin(np.arange(8), [1, 6])):
        parts.reset(0)
        for t in range(6):
            parts.step(actions[t])
        obs = parts.reset([1, 6], only=only)
        np.testing.assert_array_equal(obs[rest], expected[0][rest, 6])
        np.testing.assert_array_equal(obs[[1, 6]], expected[0][[1, 6], 0])
        assert parts.steps.tolist() == [6, 0, 6, 6, 6, 6, 0, 6]
        for t in range(6):
            mixed = actions[6 + t].copy()
            mixed[[1, 6]] = actions[t, [1, 6]]
            obs, reward, _, _ = parts.step(mixed)
            for i in range(8):
                at = t + 1 if i in (1, 6) else 7 + t
                np.testing.assert_array_equal(obs[i], expected[0][i, at])
                assert reward[i] == expected[1][i, at]
    np.testing.assert_array_equal(parts.reset(0, only=[]), obs)
    with pytest.raises(ValueError, match="2 episodes need 2 seeds, not 3"):
        parts.reset([1, 2, 3], only=[1, 6])
    parts.close()


def test_a_batch_refuses_wrong_numbers():
    batch = dynashift.make_batch("hopper", n=3)
    obs = batch.reset(0)
    for shape in [(3,), (3, 4), (2, 3), (1, 3), (3, 3, 1), ()]:
        with pytest.raises(ValueError, match=r"\(3, 3\)"):
            batch.step(np.zeros(shape))
    for value in (math.nan, math.inf):
        actions = np.zeros((3, 3))
        actions[1, 2] = value
        with pytest.raises(ValueError, match="NaN or infinite"):
            batch.step(actions)
    with pytest.raises(ValueError, match="3 episodes need 3 seeds, not 2"):
        batch.reset([1, 2])
    with pytest.raises(ValueError, match="at least one simulator, not 0"):
        dynashift.make_batch("hopper", n=0)
    # none of this moved anything
    np.testing.assert_array_equal(
        batch.step(np.zeros((3, 3)))[0], play_batch(batch, [0, 1, 2], [np.zeros((3, 3))])[0][:, 1]
    )
    assert obs.shape == (3, 11)


def test_a_batch_leaves_the_callers_actions_alone():
    batch = dynashift.make_batch("hopper", n=4)
    batch.reset(0)
    for actions in random_actions("hopper", 60, 4):
        before = actions.copy()
        batch.step(actions)
        np.testing.assert_array_equal(actions, before)
    assert batch.done.any()


# ------------------------------------------------------------------------------------------------ helper processes


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_killed_helper_is_an_error_not_a_hang(when, no_hang):
    batch = dynashift.make_batch("hopper", n=8, workers=2)
    batch.reset(0)
    ((_, process),) = batch._helpers
    if when == "before":
        process.kill()
        process.wait()
    else:
        os.kill(process.pid, signal.SIGSTOP)  # so that it cannot answer in time
        advance = batch._own.advance

        def kill_then_advance(actions):
            process.kill()
            return advance(actions)

        batch._own.advance = kill_then_advance
    with pytest.raises(RuntimeError, match=r"simulator process ended.*workers=1"):
        batch.step(np.zeros((8, 3)))
    for call in (lambda: batch.step(np.zeros((8, 3))), lambda: batch.reset(0)):  # and remains one
        with pytest.raises(RuntimeError, match="make a new one"):
            call()
    batch.close()
    assert process.poll() is not None


def test_an_interrupted_batch_does_not_go_on_with_stale_answers(no_hang):
    batch = dynashift.make_batch("hopper", n=8, workers=2)
    batch.reset(0)
    advance = batch._own.advance

    def interrupted(actions):
        raise KeyboardInterrupt

    batch._own.advance = interrupted
    with pytest.raises(KeyboardInterrupt):
        batch.step(np.ones((8, 3)))
    batch._own.advance = advance
    with pytest.raises(RuntimeError, match="make a new one"):
        batch.reset(0)
    batch.close()


def test_helpers_end_with_their_batch(no_hang):
    closed, dropped = (dynashift.make_batch("hopper", n=8, workers=2) for _ in range(2))
    (_, first), (_, second) = closed._helpers[0], dropped._helpers[0]
    closed.reset(0)
    assert first.poll() is None
    assert second.poll() is None
    closed.close()
    closed.close()
    assert first.poll() is not None
    with pytest.raises(RuntimeError, match="closed"):
        closed.reset(0)
    del dropped
    gc.collect()
    assert second.poll() is not None


def run_with_batch(then, timeout=60):
    """Run a program that makes a batch with one helper, prints its pid and goes on; returns what it printed. The helper
    has the same standard output, so this returns when both have ended and not before."""
    code = f"""
import os, signal, dynashift
batch = dynashift.make_batch("hopper", n=8, workers=2)
batch.reset(0)
print(batch._helpers[0][1].pid, flush=True)
{then}
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=timeout).stdout.split()


def ends(pid, seconds=20):
    """Whether a process is gone, or goes within that time."""
    stat, give_up = Path(f"/proc/{pid}/stat"), time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            os.kill(pid, 0)
            if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True  # an orphan that has not been reaped yet
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("death", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_helpers_end_when_their_parent_dies(death):
    (pid,) = run_with_batch(death)
    assert ends(int(pid))


def test_a_batch_can_be_closed_while_a_forked_child_lives():
    fork = """
r, w = os.pipe()
if os.fork() == 0:  # as a data loader does; it has the parent's connections too
    os.close(w)
    os.read(r, 1)
    os._exit(0)
batch.close()
print("closed", flush=True)
os._exit(0)
"""
    pid, word = run_with_batch(fork)
    assert word == "closed"
    assert ends(int(pid))


def test_helpers_import_the_package_of_their_parent(tmp_path, monkeypatch, no_hang):
    (tmp_path / "dynashift").mkdir()
    (tmp_path / "dynashift" / "__init__.py").write_text("raise SystemExit('another dynashift')")
    monkeypatch.chdir(tmp_path)
    batch = dynashift.make_batch("hopper", n=8, workers=2)
    np.testing.assert_array_equal(batch.reset(0), dynashift.make_batch("hopper", n=8, workers=1).reset(0))
    batch.close()


# ------------------------------------------------------------------------------------------------ scores


def test_the_table_has_every_robot_under_every_shift():
    assert tasks.all_tasks() == ALL
    assert get_args(tasks.Env) == ROBOTS
    assert get_args(tasks.Shift) == SHIFTS
    with pytest.raises(UserError, match=r"^--shift gravit is unknown; give none, gravity, kinematic or morph$"):
        tasks.find_task("hopper", "gravit")
    with pytest.raises(UserError, match=r"^--env hoper is unknown; give halfcheetah, hopper, walker2d or ant$"):
        tasks.find_task("hoper", "gravity")


def test_a_shift_of_another_robot_alone(monkeypatch):
    monkeypatch.setitem(tasks.SHIFTS, "friction", {"hopper": tasks.SHIFTS["none"]["hopper"]})
    assert tasks.find_task("hopper", "friction")
    with pytest.raises(UserError, match=r"--shift friction does not exist for ant; give none, .* or morph$"):
        tasks.find_task("ant", "friction")


def test_an_edit_may_be_any_attribute_of_the_model():
    spec = mujoco.MjSpec.from_file(str(models.ASSETS / tasks.ROBOTS["hopper"].xml))
    models.apply_edit(spec, "geom", "foot_geom", "friction", (0.7, 0.2, 0.3))
    models.apply_edit(spec, "option", "", "density", 1.2)
    model = spec.compile()
    assert model.geom("foot_geom").friction.tolist() == [0.7, 0.2, 0.3]
    assert model.opt.density == 1.2
    with pytest.raises(ValueError, match="unknown attribute 'taste'"):
        models.apply_edit(spec, "geom", "foot_geom", "taste", 1)


@each_env
def test_references_score_0_and_100(robot, shift):
    random, expert = tasks.find_task(robot, shift).random, tasks.find_task(robot, shift).expert
    assert random < expert
    assert normalized_score(robot, shift, random) == 0
    assert normalized_score(robot, shift, expert) == pytest.approx(100, rel=1e-15)
    returns = np.array([random, (random + expert) / 2, expert, 2 * expert - random])
    np.testing.assert_allclose(normalized_score(robot, shift, returns), [0, 50, 100, 200], atol=1e-11)


def test_a_few_published_scores():
    """Mean returns of recorded expert episodes and their published normalised scores."""
    assert normalized_score("hopper", "gravity", 4051) == pytest.approx(125.0, abs=0.06)
    assert normalized_score("hopper", "kinematic", 2845) == pytest.approx(100.1, abs=0.06)
    assert normalized_score("walker2d", "gravity", 5180) == pytest.approx(99.7, abs=0.06)
    assert normalized_score("ant", "morph", 5593) == pytest.approx(97.9, abs=0.1)
    assert normalized_score("halfcheetah", "gravity", 8140) == pytest.approx(86.0, abs=0.06)

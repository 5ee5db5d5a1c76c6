"""MuJoCo models of the robots: gymnasium's XML, the edits of a shift, and three corrections.

The published data were recorded with an engine older than MuJoCo 2.1.2. The corrections make the
pinned MuJoCo behave like it; `python -m dynashift.replay DIR` proves it on every recorded
transition.
"""

import itertools
import math
from pathlib import Path

import gymnasium
import mujoco
import numpy as np

from dynashift.tasks import ROBOTS, find_task

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


def build_model(env: str, shift: str, physics: str = "corrected") -> mujoco.MjModel:
    """Stock XML + the shift's edits (+ engine corrections unless physics="stock")."""
    task = find_task(env, shift)
    if physics not in ("corrected", "stock"):
        raise ValueError(f'physics is "corrected" or "stock", not "{physics}"')
    spec = mujoco.MjSpec.from_file(str(ASSETS / ROBOTS[env].xml))
    for edit in task.edits:
        apply_edit(spec, *edit)
    if physics == "corrected":
        _contact_pairs(spec)
        spec.compiler.settotalmass = -1  # _legacy_inertia does that
    model = spec.compile()
    if physics == "corrected":
        _legacy_inertia(model, {g.id: g.density for g in spec.geoms}, ROBOTS[env].total_mass)
    # One robot is one island, so there is no need to search for islands at every step.
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND
    return model


def apply_edit(spec: mujoco.MjSpec, kind: str, name: str, attribute: str, value) -> None:
    """Change one attribute of one element. The kind "option" has no name: it is the whole model."""
    element = spec.option if kind == "option" else getattr(spec, kind)(name)
    if attribute == "gravity_z":
        element.gravity = [0, 0, value]
    elif attribute == "range_factors":  # on the lower and the upper limit
        element.range = np.multiply(element.range, value)
    elif attribute == "radius":
        element.size = [value, element.size[1], 0]
    elif attribute == "half_length":
        element.size = [element.size[0], value, 0]
    elif attribute == "fromto":
        # Set pos, quat and half length, whichever form the stock XML uses.
        start, end = np.split(np.array(value, float), 2)
        length = np.linalg.norm(end - start)
        quat = np.zeros(4)
        mujoco.mju_quatZ2Vec(quat, (end - start) / length)
        element.fromto = np.full(6, np.nan)
        element.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT
        element.pos = (start + end) / 2
        element.quat = quat
        element.size = [element.size[0], length / 2, 0]
    elif hasattr(element, attribute):
        setattr(element, attribute, value)
    else:
        raise ValueError(f"unknown attribute {attribute!r} in the table of shifts")


def _legacy_inertia(m: mujoco.MjModel, density: dict[int, float], total_mass: float | None) -> None:
    """Correction 1: the mass and inertia of capsules.

    MuJoCo before 2.1.2 treated a capsule of radius r and half length h as a cylinder of length
    2h + r.
    """
    for body in range(1, m.nbody):
        masses = []
        centres = []
        inertias = []
        first = m.body_geomadr[body]
        for g in range(first, first + m.body_geomnum[body]):
            r, h = m.geom_size[g, :2]
            if m.geom_type[g] == mujoco.mjtGeom.mjGEOM_CAPSULE:
                length = 2 * h + r
                mass = density[g] * math.pi * r**2 * length
                across = mass * (3 * r**2 + length**2) / 12
                principal = np.array([across, across, mass * r**2 / 2])
            else:  # ant's torso, the only other shape, is a sphere
                mass = density[g] * 4 / 3 * math.pi * r**3
                principal = np.full(3, 2 / 5 * mass * r**2)
            rotation = np.zeros(9)
            mujoco.mju_quat2Mat(rotation, m.geom_quat[g])
            rotation = rotation.reshape(3, 3)
            masses.append(mass)
            centres.append(m.geom_pos[g].copy())
            inertias.append(rotation * principal @ rotation.T)  # R diag(I) R'
        m.body_mass[body] = mass = sum(masses)
        if len(masses) == 1:  # one geom: its own frame is the principal one
            m.body_ipos[body] = centres[0]
            m.body_iquat[body] = m.geom_quat[first]
            m.body_inertia[body] = principal
            continue
        centre = sum(mi * ci for mi, ci in zip(masses, centres, strict=True)) / mass
        inertia = np.zeros((3, 3))
        for mi, ci, inertia_i in zip(masses, centres, inertias, strict=True):  # parallel axes
            x = ci - centre
            inertia += inertia_i + mi * (x @ x * np.eye(3) - np.outer(x, x))
        eigenvalues = np.zeros(3)
        eigenvectors = np.zeros(9)
        quat = np.zeros(4)
        mujoco.mju_eig3(eigenvalues, eigenvectors, quat, inertia.ravel())
        m.body_ipos[body] = centre
        m.body_iquat[body] = quat
        m.body_inertia[body] = eigenvalues
    if total_mass:
        scale = total_mass / m.body_mass.sum()
        m.body_mass[:] *= scale
        m.body_inertia[:] *= scale
    mujoco.mj_setConst(m, new_data(m))  # everything derived from masses, at the reference pose
    # This scales the solver's tolerance, and MuJoCo 4 does not update it.
    m.stat.meaninertia = sum(m.dof_M0) / m.nv


def _contact_pairs(spec: mujoco.MjSpec) -> None:
    """Correction 2: contact margins.

    In the data, the margin of a contact is the larger one of its two geoms; MuJoCo 3.5.0 and later
    add them. So every pair that MuJoCo would find by itself is listed explicitly, with the
    parameters that MuJoCo would find and that margin. This also saves the search for pairs, which
    takes up to a sixth of a step. In MuJoCo 3.4 it does not change a single bit.
    """
    geoms = list(spec.geoms)
    for a, b in itertools.combinations(geoms, 2):
        may_touch = a.contype & b.conaffinity or b.contype & a.conaffinity
        # Ant has bodies without a name, but these can only touch the floor.
        bodies = {a.parent.name, b.parent.name}
        # A parent precedes its children, so only a can be the parent.
        jointed = "world" not in bodies and b.parent.parent.name == a.parent.name
        if may_touch and len(bodies) == 2 and not jointed:
            friction = np.maximum(a.friction, b.friction)
            spec.add_pair(
                geomname1=a.name,
                geomname2=b.name,
                condim=max(a.condim, b.condim),
                friction=friction[[0, 0, 1, 2, 2]],  # two sliding, one torsional, two rolling
                solref=a.solref,  # all geoms of a robot share these two
                solimp=a.solimp,
                margin=max(a.margin, b.margin),
            )
    for geom in geoms:
        geom.contype = geom.conaffinity = 0


def legacy_rk4(m: mujoco.MjModel, d: mujoco.MjData, nstep: int = 1) -> None:
    """Correction 3: classical RK4, without the term that MuJoCo 4 adds for free joints (ant)."""
    for _ in range(nstep):
        h = m.opt.timestep
        mujoco.mj_forward(m, d)
        q0 = d.qpos.copy()
        v = [d.qvel.copy()]
        a = [d.qacc.copy()]
        for c in (0.5, 0.5, 1.0):
            q = q0.copy()
            mujoco.mj_integratePos(m, q, c * v[-1], h)
            d.qpos[:] = q
            d.qvel[:] = v[0] + h * c * a[-1]
            v.append(d.qvel.copy())
            mujoco.mj_forward(m, d)
            a.append(d.qacc.copy())
        mujoco.mj_integratePos(m, q0, (v[0] + 2 * v[1] + 2 * v[2] + v[3]) / 6, h)
        d.qpos[:] = q0
        d.qvel[:] = v[0] + h * (a[0] + 2 * a[1] + 2 * a[2] + a[3]) / 6
        d.time += h


def stepper(env: str, physics: str):
    modern = int(mujoco.__version__.split(".")[0]) >= 4
    return legacy_rk4 if physics == "corrected" and env == "ant" and modern else mujoco.mj_step


def new_data(model: mujoco.MjModel) -> mujoco.MjData:
    data = mujoco.MjData(model)
    # MjData() makes MuJoCo time every stage of every step for a profiler, which takes a tenth of
    # the time.
    mujoco.set_mjcb_time(None)
    return data

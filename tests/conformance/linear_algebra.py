"""Decompositions, solvers and spectra."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
from jax import lax

from .registry import Case, area, normal, one_task, weights


program = area("linear algebra")


def _positive(size=64, seed=0):
    a = normal(size, size, seed=seed)
    return a @ a.T / size + 2 * jnp.eye(size)


def _dominant(size=64):
    return weights(1, size)[0] + 4 * jnp.eye(size)


@program(thorough=True)
def a_cholesky_factor():
    def fn(a, b):
        c = jnp.linalg.cholesky(a)
        return c, c @ b, jsl.cho_solve((c, True), b)

    return Case(fn, (_positive(), normal(64, 64)))


@program()
def a_qr_decomposition():
    def fn(a):
        q, r = jnp.linalg.qr(a)
        return q, r, q @ r, jnp.linalg.qr(a, mode="r")

    return Case(fn, (normal(64, 48),))


@program()
def singular_values():
    def fn(a):
        u, s, v = jnp.linalg.svd(a, full_matrices=False)
        return (u * s) @ v, s, jnp.linalg.svd(a @ a.T, compute_uv=False)

    return Case(fn, (normal(48, 32),))


@program()
def eigenvalues_of_a_symmetric_matrix():
    def fn(a):
        values, vectors = jnp.linalg.eigh(a)
        return values, (vectors * values) @ vectors.T, jnp.linalg.eigvalsh(a @ a)

    return Case(fn, (_positive(48),))


@program(long=True)
def eigenvalues_of_any_matrix():
    def fn(a):
        values, vectors = jnp.linalg.eig(a)
        return (vectors * values) @ jnp.linalg.inv(vectors)

    return Case(fn, (_dominant(32),))


@program(long=True)
def solving_a_linear_system():
    def fn(a, b):
        return jnp.linalg.solve(a, b) @ b, jnp.linalg.solve(a, b[:, 0])

    return Case(fn, (_dominant(), normal(64, 64)))


@program(long=True)
def solving_a_triangular_system():
    def fn(a, b):
        low = jnp.tril(a)
        x = jsl.solve_triangular(low, b, lower=True)
        return x @ b, lax.linalg.triangular_solve(low.T, b, left_side=False, lower=False)

    return Case(fn, (_dominant(), normal(64, 64)))


@program(long=True)
def inverse_and_determinant():
    def fn(a):
        return jnp.linalg.inv(a) @ a, jnp.linalg.slogdet(a), jnp.linalg.det(a / 4)

    return Case(fn, (_dominant(),))


@program(one_task("scan"), long=True)
def a_matrix_exponential():
    return Case(lambda a: jsl.expm(a, max_squarings=0) @ a, (weights(1, 32)[0],))


@program(long=True)
def a_gradient_of_a_solve():
    def fn(a, b):
        return jax.grad(lambda a, b: jnp.sum(jnp.linalg.solve(a, b) ** 2), (0, 1))(a, b)

    return Case(fn, (_dominant(), normal(64, 64)))


@program()
def fourier_transforms():
    def fn(x):
        z = jnp.fft.fft2(x)
        back = jnp.fft.ifft2(z * 2)
        return back.real @ x, z, jnp.fft.fftshift(z), jnp.fft.fftfreq(64)

    return Case(fn, (normal(64, 64),))


@program()
def fourier_transforms_of_real_numbers():
    def fn(x):
        z = jnp.fft.rfft(x)
        return z, jnp.fft.irfft(z, n=64) @ x, jax.scipy.fft.dct(x)

    return Case(fn, (normal(64, 64),))


@program()
def complex_products():
    def fn(a, b):
        c = a @ jnp.conj(b).T
        return c, c.real, jnp.angle(c), jnp.abs(c), lax.complex(c.imag, c.real)

    z = (normal(64, 64) + 1j * normal(64, 64, seed=1)).astype("complex64")
    return Case(fn, (z, z.T.copy()))

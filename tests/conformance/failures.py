"""Programs that `jax.jit` refuses or that fail while they run: the same kind of error."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .registry import Case, Script, area, normal, weights


program = area("failures")


@program(raises="TracerBoolConversionError")
def a_branch_on_a_traced_value():
    return Case(lambda x: x if x.sum() > 0 else -x, (normal(64, 64),))


@program(raises="TracerIntegerConversionError")
def a_traced_value_as_an_index_of_a_list():
    return Case(lambda x, i: [x, x @ x][i], (normal(64, 64), 1))


@program(raises="ConcretizationTypeError")
def a_traced_value_as_a_number_of_python():
    return Case(lambda x: x * float(x[0, 0]), (normal(64, 64),))


@program(raises="TracerArrayConversionError")
def a_traced_value_as_an_array_of_numpy():
    return Case(lambda x: np.sin(np.asarray(x)), (normal(64, 64),))


@program(raises="NonConcreteBooleanIndexError")
def a_mask_of_unknown_size():
    return Case(lambda x: x[x > 0], (normal(64, 64),))


@program(raises="TypeError")
def shapes_that_do_not_match():
    return Case(lambda x, y: x @ y, (normal(64, 64), normal(32, 32)))


@program(raises="ValueError")
def shapes_that_do_not_broadcast():
    return Case(lambda x, y: x + y, (normal(64, 64), normal(63)))


@program(raises="TypeError")
def a_shape_that_is_traced():
    return Case(lambda n: jnp.ones((n, 3)), (4,))


@program(raises="TypeError")
def an_argument_that_is_no_array():
    return Case(lambda x, name: x @ x, (normal(64, 64), "name"))


@program(raises="TypeError")
def a_result_that_is_no_array():
    return Case(lambda x: (x @ x, "done"), (normal(64, 64),))


@program(raises="TypeError")
def too_few_arguments():
    return Case(lambda x, y: x @ y, (normal(64, 64),))


@program(raises="ValueError")
def a_static_argument_without_a_hash():
    return Case(lambda x, n: x @ x, (normal(64, 64), [1]), {"static_argnums": 1})


@program(raises="TypeError")
def assigning_to_an_array():
    def fn(x):
        x[0] = 1.0
        return x

    return Case(fn, (normal(64, 64),))


@program(raises="TypeError")
def a_carry_that_changes_its_type():
    def fn(x):
        return lax.scan(lambda c, _: (c.astype(jnp.int32), None), x, None, length=2)

    return Case(fn, (normal(64, 64),))


@program(raises="TypeError")
def branches_of_different_types():
    return Case(lambda x: lax.cond(True, lambda: x, lambda: x[0]), (normal(64, 64),))


@program(raises="TypeError")
def a_gradient_of_something_not_scalar():
    return Case(jax.grad(lambda x: x @ x), (normal(64, 64),))


@program(raises="TypeError")
def a_gradient_by_integers():
    return Case(jax.grad(lambda n: n * 2.0), (3,))


@program(raises="ValueError")
def a_gradient_through_a_while_loop():
    def fn(x):
        return jax.grad(lambda x: lax.while_loop(lambda y: y < 9, lambda y: y * 2, x))(x)

    return Case(fn, (1.0,))


@program(raises="NameError")
def an_axis_without_a_name():
    return Case(lambda x: lax.psum(x @ x, "nowhere"), (normal(64, 64),))


@program(raises="TypeError")
def a_string_in_place_of_a_key():
    return Case(lambda x: jax.random.normal(x, (3,)), (normal(64, 64),))


@program()
def an_unknown_static_name():
    def run(jit):
        return _error(lambda: jit(lambda x: x, static_argnames="nowhere"))

    return Script(run, inlined=True)


def _error(call, kind=None):
    """The type of the error that a call raises; of a `kind`, where one is given."""
    try:
        return repr(type(call()))
    except Exception as error:
        return type(error).__name__ if kind is None else isinstance(error, kind)


@program()
def a_donated_argument_that_is_not_there():
    def run(jit):
        return _error(lambda: jit(lambda x: x, donate_argnums=3)(normal(64, 64)))

    return Script(run, inlined=True)


@program()
def static_and_donated_at_once():
    def run(jit):
        return _error(lambda: jit(lambda x: x, donate_argnums=0, static_argnums=0))

    return Script(run, inlined=True)


@program()
def something_that_is_no_function():
    def run(jit):
        return _error(lambda: jit(3))

    return Script(run, inlined=True)


@program(raises="KeyError")
def an_error_raised_while_tracing():
    def fn(x):
        raise KeyError("mine")

    return Case(fn, (normal(64, 64),))


@program(raises="JaxRuntimeError")
def an_error_in_a_pure_callback():
    def fail(x):
        raise KeyError("mine")

    def fn(x):
        y = jax.pure_callback(fail, jax.ShapeDtypeStruct((64, 64), "float32"), x @ x)
        return y @ x

    return Case(fn, (normal(64, 64),))


@program(raises="JaxRuntimeError")
def a_callback_with_the_wrong_shape():
    def fn(x):
        struct = jax.ShapeDtypeStruct((64, 64), "float32")
        y = jax.pure_callback(lambda y: np.zeros(3, np.float32), struct, x @ x)
        return y @ x

    return Case(fn, (normal(64, 64),))


@program()
def a_leaked_tracer():
    def run(jit):
        kept = []
        jit(lambda x: kept.append(x @ x) or jnp.sin(x))(normal(64, 64))
        return _error(lambda: jit(lambda x: x + kept[0])(normal(64, 64)))

    return Script(run)


@program(context=lambda: jax.debug_nans(True), raises="FloatingPointError")
def a_nan_while_nans_are_debugged():
    return Case(lambda x: jnp.log(-jnp.abs(x @ x)) @ x, (normal(64, 64),))


@program(context=lambda: jax.debug_nans(True))
def no_nan_while_nans_are_debugged():
    return Case(lambda x: jnp.log(1 + jnp.abs(x @ x)) @ x, (normal(64, 64),))


@program(context=lambda: jax.debug_infs(True))
def an_infinity_while_infinities_are_debugged():
    return Case(lambda x: (1 / jnp.zeros_like(x)) @ x @ x, (normal(64, 64),))


@program(context=lambda: jax.numpy_dtype_promotion("strict"), raises="TypePromotionError")
def a_promotion_while_it_is_strict():
    return Case(lambda x, n: x @ x + n, (normal(64, 64), np.int32(3)))


@program(context=lambda: jax.transfer_guard("disallow"), raises="JaxRuntimeError")
def a_transfer_while_they_are_guarded():
    return Case(lambda x: x @ x, (normal(64, 64),))


@program(context=lambda: jax.checking_leaks())
def a_function_while_leaks_are_checked():
    return Case(lambda x, w: jnp.tanh(x @ w) @ w, (normal(64, 64), weights(1)[0]))


@program(context=lambda: jax.debug_nans(True))
def a_division_while_nans_are_debugged():
    return Case(lambda x: (x / jnp.sum(x * x)) @ x @ x, (normal(64, 64),))


@program(context=lambda: jax.debug_nans(True))
def a_nan_that_is_masked_while_nans_are_debugged():
    def fn(x):
        y = jnp.log(x) @ x
        return jnp.where(jnp.isnan(y), 0.0, y) @ x

    return Case(fn, (normal(64, 64),))


@program()
def a_call_without_transfers_while_they_are_guarded():
    def run(jit):
        x = jax.device_put(normal(64, 64))
        f = jit(lambda x: x @ x @ x)
        with jax.transfer_guard("disallow"):
            return f(x)

    return Script(run)


@program()
def a_deleted_argument():
    def run(jit):
        x = jnp.asarray(normal(64, 64))
        x.delete()
        return _error(lambda: jit(lambda x: x @ x)(x), RuntimeError)

    return Script(run, inlined=True)


@program(known="ArgumentError, though nothing reads it")
def a_deleted_argument_that_is_not_used():
    def run(jit):
        x = jnp.asarray(normal(64, 64))
        x.delete()
        return jit(lambda unused, y: y @ y)(x, normal(64, 64))

    return Script(run)


@program()
def a_donated_argument_that_is_passed_again():
    def run(jit):
        x = jnp.asarray(normal(64, 64))
        f = jit(lambda x: x @ x, donate_argnums=0)
        return f(x), _error(lambda: f(x), (RuntimeError, ValueError))

    return Script(run)


@program()
def an_argument_donated_and_passed_twice():
    def run(jit):
        x = jnp.asarray(normal(64, 64))
        f = jit(lambda x, y: (x @ y, x + y), donate_argnums=(0, 1))
        return _error(lambda: f(x, x), RuntimeError)

    return Script(run)


@program()
def a_compiled_function_under_a_transformation():
    def run(jit):
        compiled = jit(lambda x: x @ x).lower(normal(64, 64)).compile()
        return _error(lambda: jax.grad(lambda x: compiled(x).sum())(normal(64, 64)))

    return Script(run)


@program()
def a_compiled_function_called_with_something_else():
    def run(jit):
        compiled = jit(lambda x: x @ x).lower(normal(64, 64)).compile()
        others = [(normal(32, 32),), (normal(64, 64),) * 2, (normal(64, 64).astype(int),)]
        return [_error(lambda args=args: compiled(*args)) for args in others]

    return Script(run)

//! How a `multi` grader computes its reward from those of others: CEL, but arithmetic only.

use anyhow::{Context as _, bail, ensure};
use cel::common::ast::Expr;
use cel::{Context, Program, Value};

/// Longest formula, bytes.
const FORMULA_BYTES_MAX: usize = 1024;
/// Maximum brackets and question marks, which limits its nesting.
const NESTED_MAX: usize = 64;

/// A number computed from numbers that have names, in CEL.
#[derive(Debug)]
pub struct Formula {
    program: Program,
}

impl Formula {
    /// Compiles it, and tries it with 0, 0.5 and 1 for every number. It must use all of them. The error
    /// goes on from its field's name.
    pub fn new(text: &str, names: &[&str]) -> anyhow::Result<Self> {
        ensure!(
            text.len() <= FORMULA_BYTES_MAX,
            "has {} bytes; at most {FORMULA_BYTES_MAX} are allowed",
            text.len()
        );
        // The parser panics beyond its own limit of 96.
        let nested = text.matches(['(', '[', '{', '?']).count();
        ensure!(
            nested <= NESTED_MAX,
            "has {nested} brackets and question marks; at most {NESTED_MAX} are allowed"
        );
        let program = Program::compile(text).map_err(|error| anyhow::anyhow!("is not a CEL expression: {error}"))?;
        ensure!(
            is_arithmetic(&program.expression().expr),
            "is more than arithmetic: there are numbers, names, operators and functions of them"
        );
        let references = program.references();
        if let Some(unused) = names.iter().find(|name| !references.has_variable(**name)) {
            bail!("does not use {unused:?}");
        }
        for name in references.variables() {
            ensure!(
                names.contains(&name),
                "names {name:?}, which is none of {}",
                names.join(", ")
            );
        }
        drop(references);
        let formula = Self { program };
        for number in [0.0, 0.5, 1.0] {
            let tried: Vec<(&str, f64)> = names.iter().map(|name| (*name, number)).collect();
            let why = || format!("with {number} for every name");
            formula.value(&tried).with_context(why)?;
        }
        Ok(formula)
    }

    /// Fails if the result is no number, or not finite.
    pub fn value(&self, numbers: &[(&str, f64)]) -> anyhow::Result<f64> {
        let mut context = Context::default();
        for (name, number) in numbers {
            context.add_variable_from_value(*name, *number);
        }
        let number = match self.program.execute(&context).context("cannot be computed")? {
            Value::Float(number) => number,
            Value::Int(number) => number as f64,
            Value::UInt(number) => number as f64,
            other => bail!("returns a {}, not a number", other.type_of()),
        };
        ensure!(number.is_finite(), "returns {number}");
        Ok(number)
    }
}

/// Whether it has neither loops nor collections, so that it is computed in the time that it takes to
/// read.
fn is_arithmetic(expression: &Expr) -> bool {
    match expression {
        Expr::Ident(_) | Expr::Literal(_) => true,
        Expr::Call(call) => {
            let target = call.target.as_deref();
            target
                .into_iter()
                .chain(&call.args)
                .all(|part| is_arithmetic(&part.expr))
        }
        _ => false,
    }
}

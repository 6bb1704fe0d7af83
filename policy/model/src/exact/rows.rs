//! Rows of values, and what a layer keeps of them.

use crate::transformer::Part;
use std::sync::Arc;

/// Rows of f32 values, `[len, width]`, row-major. Clones share the values until one is changed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rows {
    pub(super) width: usize,
    pub(super) values: Arc<Vec<f32>>,
}

impl Rows {
    pub fn zeros(rows: usize, width: usize) -> Self {
        Rows {
            width,
            values: Arc::new(vec![0.0; rows * width]),
        }
    }

    /// # Panics
    /// If `values` are not whole rows.
    pub fn from_values(width: usize, values: Vec<f32>) -> Self {
        assert!(
            width > 0 && values.len().is_multiple_of(width),
            "values are whole rows of {width}"
        );
        Rows {
            width,
            values: Arc::new(values),
        }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn len(&self) -> usize {
        self.values.len() / self.width.max(1)
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// All values, row-major.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }

    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.width.max(1))
    }

    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        Arc::make_mut(&mut self.values).as_mut_slice()
    }

    pub(super) fn rows_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        let width = self.width.max(1);
        self.values_mut().chunks_exact_mut(width)
    }

    pub(super) fn pick(&self, rows: impl Iterator<Item = usize>) -> Rows {
        Rows {
            width: self.width,
            values: Arc::new(rows.flat_map(|row| self.row(row).iter().copied()).collect()),
        }
    }
}

/// What a gradient needs of a dense block, besides its input.
#[derive(Debug, Clone, Default)]
pub struct Kept(pub(super) [Rows; Part::COUNT]);

impl Kept {
    pub(crate) fn part(&self, part: Part) -> &Rows {
        &self.0[part as usize]
    }
}

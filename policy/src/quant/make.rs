//! Putting a copy together: bands of rows on whichever thread is free, each into its own part of the codes and scales.

use super::select::{self, Matrix, Place};
use super::weight::{Bf16, F32, NotFinite};
use super::{Error, Spec, Touched, config, fp8, int4};
use crate::image::{Image, TensorData, bytes_of};
use crate::kernel::Threads;
use bytes::Bytes;
use safetensors::Dtype;

/// Rows that are done at once: those of a block.
const BAND: usize = fp8::BLOCK;

/// The copy of `image`, out of a copy and what that is of where there is one.
pub(super) fn make(
    image: &Image,
    spec: Spec,
    from: Option<(&Image, &Image)>,
    threads: &Threads,
) -> Result<(Image, Touched), Error> {
    let config = image.files.get("config.json").ok_or(Error::Config("is not there"))?;
    let mut copy = Image {
        files: image.files.clone(),
        ..Image::default()
    };
    let config = config::with_quantisation(config, spec, &select::untouched(image, spec))?;
    copy.files.insert("config.json".into(), config);

    let mut matrices = vec![];
    for (name, tensor) in &image.tensors {
        match select::matrix(name, tensor, spec) {
            Some(matrix) => matrices.push(matrix),
            None => insert(&mut copy, name.clone(), tensor.clone())?,
        }
    }
    if matrices.is_empty() {
        return Err(Error::Nothing(spec));
    }
    let mut touched = Touched::default();
    let work = threads.map(matrices, |matrix| Work::of(matrix, spec, from));
    let mut work = work.into_iter().collect::<Result<Vec<Work>, Error>>()?;
    let jobs = work.iter_mut().flat_map(|work| work.jobs(spec)).collect();
    for (name, done) in threads.map(jobs, |job| (job.name, job.run(spec))) {
        touched += done.map_err(|NotFinite| Error::NotFinite(name.to_owned()))?;
    }
    for Work {
        matrix, places, bytes, ..
    } in work
    {
        let [codes, scales] = places;
        let (code_bytes, scale_bytes) = match bytes {
            Made::Kept { codes, scales, blocks } => {
                touched.blocks += blocks;
                (codes, scales)
            }
            Made::Anew { codes, scales, .. } => (codes.into(), scales.into()),
        };
        for (place, bytes) in [(codes, code_bytes), (scales, scale_bytes)] {
            let tensor = TensorData::new(place.dtype, place.shape(), bytes)?;
            insert(&mut copy, place.name, tensor)?;
        }
        if let Some((name, tensor)) = matrix.shape_tensor(spec) {
            insert(&mut copy, name, tensor)?;
        }
    }
    Ok((copy, touched))
}

fn insert(copy: &mut Image, name: String, tensor: TensorData) -> Result<(), Error> {
    match copy.tensors.contains_key(&name) {
        true => Err(Error::Taken(name)),
        false => {
            copy.tensors.insert(name, tensor);
            Ok(())
        }
    }
}

/// A matrix, and what becomes of it.
struct Work<'a> {
    matrix: Matrix<'a>,
    places: [Place; 2],
    bytes: Made<'a>,
}

enum Made<'a> {
    /// The matrix did not change.
    Kept { codes: Bytes, scales: Bytes, blocks: u64 },
    Anew {
        before: Option<&'a [u8]>,
        codes: Vec<u8>,
        scales: Vec<u8>,
    },
}

impl<'a> Work<'a> {
    fn of(matrix: Matrix<'a>, spec: Spec, from: Option<(&'a Image, &'a Image)>) -> Result<Self, Error> {
        let places = matrix.places(spec);
        let [codes, scales] = &places;
        let held = from.and_then(|(previous, before)| {
            let before = before.tensors.get(matrix.name)?;
            let same_form = before.dtype == matrix.tensor.dtype && before.shape == matrix.tensor.shape;
            let tensor = |place: &Place| {
                let tensor = previous.tensors.get(&place.name)?;
                (tensor.dtype == place.dtype && tensor.shape == place.shape()).then_some(&tensor.bytes)
            };
            same_form.then_some((&before.bytes, tensor(codes)?, tensor(scales)?))
        });
        let bytes = match held {
            Some((before, codes, scales)) if same(before, &matrix.tensor.bytes) => Made::Kept {
                codes: Bytes::clone(codes),
                scales: Bytes::clone(scales),
                blocks: scales.len() as u64 / scale_bytes(spec) as u64,
            },
            Some((before, codes, scales)) => Made::Anew {
                before: Some(before),
                codes: codes.to_vec(),
                scales: scales.to_vec(),
            },
            None => Made::Anew {
                before: None,
                codes: zeros(codes)?,
                scales: zeros(scales)?,
            },
        };
        Ok(Work { matrix, places, bytes })
    }

    fn jobs(&mut self, spec: Spec) -> Vec<Job<'_>> {
        let Made::Anew { before, codes, scales } = &mut self.bytes else {
            return vec![];
        };
        let rows = self.matrix.rows;
        let after = &self.matrix.tensor.bytes;
        let weight_bytes = after.len() / rows * BAND;
        let code_bytes = codes.len() / rows * BAND;
        let [_, scale_place] = &self.places;
        let scale_bytes = scales.len() / scale_place.rows * scale_rows(spec);
        let befores = before.map(|before| before.chunks(weight_bytes));
        let mut befores = befores.into_iter().flatten();
        let bands = after.chunks(weight_bytes).zip(codes.chunks_mut(code_bytes));
        bands
            .zip(scales.chunks_mut(scale_bytes))
            .map(|((after, codes), scales)| Job {
                name: self.matrix.name,
                dtype: self.matrix.tensor.dtype,
                columns: self.matrix.columns,
                before: befores.next(),
                after,
                codes,
                scales,
            })
            .collect()
    }
}

/// A band of a matrix.
struct Job<'a> {
    name: &'a str,
    dtype: Dtype,
    columns: usize,
    before: Option<&'a [u8]>,
    after: &'a [u8],
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl Job<'_> {
    fn run(self, spec: Spec) -> Result<Touched, NotFinite> {
        let Job {
            columns,
            before,
            after,
            codes,
            scales,
            ..
        } = self;
        match (spec, self.dtype) {
            (Spec::Fp8, Dtype::BF16) => fp8::band::<Bf16>(columns, before, after, codes, scales),
            (Spec::Fp8, _) => fp8::band::<F32>(columns, before, after, codes, scales),
            (Spec::Int4, Dtype::BF16) => int4::band::<Bf16>(before, after, codes, scales),
            (Spec::Int4, _) => int4::band::<F32>(before, after, codes, scales),
        }
    }
}

fn scale_bytes(spec: Spec) -> usize {
    match spec {
        Spec::Fp8 => fp8::SCALE_BYTES,
        Spec::Int4 => int4::SCALE_BYTES,
    }
}

/// Rows of scales in a band.
fn scale_rows(spec: Spec) -> usize {
    match spec {
        Spec::Fp8 => 1,
        Spec::Int4 => BAND,
    }
}

fn zeros(place: &Place) -> Result<Vec<u8>, Error> {
    let shape = place.shape();
    match bytes_of(place.dtype, &shape) {
        Some(bytes) => Ok(vec![0; bytes]),
        None => Err(Error::Image(crate::image::Error::Shape {
            dtype: place.dtype,
            shape,
            bytes: 0,
        })),
    }
}

/// A version that was made by a delta shares the tensors that did not change with its base.
fn same(a: &Bytes, b: &Bytes) -> bool {
    (a.as_ptr() == b.as_ptr() && a.len() == b.len()) || a == b
}

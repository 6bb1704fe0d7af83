//! Makes a copy. Threads share the work in bands of rows, each writing its own codes and scales.

use std::collections::BTreeMap;

use bytes::Bytes;
use safetensors::Dtype;

use super::select::{self, Matrix, Place};
use super::weight::{Bf16, F32, NotFinite};
use super::{Error, Spec, config, fp8, int4, nvfp4, weight};
use crate::checkpoint::Checkpoint;
use crate::memory::Buffer;
use crate::tensor::{TensorData, WrongSize, bytes_of};
use crate::threads::Threads;

/// Rows of a band: those of an fp8 block.
const BAND: usize = fp8::BLOCK;

/// The copy of `checkpoint`.
pub(super) fn make(checkpoint: &Checkpoint, spec: Spec, threads: &Threads) -> Result<Checkpoint, Error> {
    let config = checkpoint.files.get("config.json");
    let config = config.ok_or(Error::Config("is not there"))?;
    let config = config::with_quantization(config, spec, &select::untouched(checkpoint, spec))?;
    let mut copy = Checkpoint {
        files: checkpoint.files.clone(),
        ..Checkpoint::default()
    };
    copy.files.insert("config.json".into(), config);

    let mut outputs = vec![];
    for (name, tensor) in &checkpoint.tensors {
        match select::matrix(name, tensor, spec) {
            Some(matrix) => outputs.push(Output::of(matrix, spec)?),
            None => insert(&mut copy, name.clone(), tensor.clone())?,
        }
    }
    if outputs.is_empty() {
        return Err(Error::Nothing(spec));
    }
    if spec == Spec::Nvfp4 {
        share_scales(&mut outputs, threads)?;
    }
    let bands = outputs.iter_mut().flat_map(|output| output.bands(spec)).collect();
    let quantized = threads.map(bands, |band| {
        let name = band.matrix;
        band.quantize(spec)
            .map_err(|NotFinite| Error::NotFinite(name.to_owned()))
    });
    quantized.into_iter().collect::<Result<(), Error>>()?;
    for Output {
        matrix,
        common,
        tensors,
    } in outputs
    {
        for (place, bytes) in tensors {
            let tensor = TensorData::new(place.dtype, place.shape(), Bytes::from_owner(bytes))?;
            insert(&mut copy, place.name, tensor)?;
        }
        if let Some((name, tensor)) = matrix.third_tensor(spec, common) {
            insert(&mut copy, name, tensor)?;
        }
    }
    Ok(copy)
}

/// Gives matrices that engines join one common scale.
fn share_scales(outputs: &mut [Output<'_>], threads: &Threads) -> Result<(), Error> {
    let bands = outputs.iter().flat_map(|Output { matrix, .. }| {
        let rows = matrix.tensor.bytes.len() / matrix.rows * BAND;
        matrix.tensor.bytes.chunks(rows).map(move |band| (matrix, band))
    });
    let largest = threads.map(bands.collect(), |(matrix, band): (&Matrix<'_>, &[u8])| {
        let largest = match matrix.tensor.dtype {
            Dtype::BF16 => weight::largest::<Bf16>(band),
            _ => weight::largest::<F32>(band),
        };
        (matrix.joined().to_owned(), largest)
    });
    let mut of_joined: BTreeMap<String, u32> = BTreeMap::new();
    for (joined, largest) in largest {
        let most = of_joined.entry(joined).or_default();
        *most = largest.max(*most);
    }
    for Output { matrix, common, .. } in outputs {
        let largest = of_joined.get(matrix.joined()).copied().unwrap_or_default();
        *common = nvfp4::common_scale(largest).map_err(|NotFinite| Error::NotFinite(matrix.name.to_owned()))?;
    }
    Ok(())
}

fn insert(copy: &mut Checkpoint, name: String, tensor: TensorData) -> Result<(), Error> {
    match copy.tensors.contains_key(&name) {
        true => Err(Error::Taken(name)),
        false => {
            copy.tensors.insert(name, tensor);
            Ok(())
        }
    }
}

/// A matrix, and the tensors that replace it: codes and scales.
struct Output<'a> {
    matrix: Matrix<'a>,
    /// Of the matrices that engines join; 1 if the spec has none.
    common: f32,
    tensors: [(Place, Buffer<u8>); 2],
}

impl<'a> Output<'a> {
    fn of(matrix: Matrix<'a>, spec: Spec) -> Result<Self, Error> {
        let [codes, scales] = matrix.places(spec);
        let (code_bytes, scale_bytes) = (room(&codes)?, room(&scales)?);
        let tensors = [(codes, code_bytes), (scales, scale_bytes)];
        Ok(Output {
            matrix,
            common: 1.0,
            tensors,
        })
    }

    fn bands(&mut self, spec: Spec) -> impl Iterator<Item = Band<'_>> {
        let Matrix {
            name,
            tensor,
            rows,
            columns,
        } = self.matrix;
        let common = self.common;
        let [(_, codes), (scale_place, scales)] = &mut self.tensors;
        let scale_rows = match spec {
            Spec::Fp8 => 1,
            Spec::Int4 | Spec::Nvfp4 => BAND,
        };
        let weights = tensor.bytes.chunks(tensor.bytes.len() / rows * BAND);
        let (code_bytes, scale_bytes) = (codes.len() / rows, scales.len() / scale_place.rows);
        let codes = codes.chunks_mut(code_bytes * BAND);
        let scales = scales.chunks_mut(scale_bytes * scale_rows);
        weights
            .zip(codes)
            .zip(scales)
            .map(move |((weights, codes), scales)| Band {
                matrix: name,
                dtype: tensor.dtype,
                columns,
                common,
                weights,
                codes,
                scales,
            })
    }
}

/// Some rows of a matrix, and their codes and scales.
struct Band<'a> {
    matrix: &'a str,
    dtype: Dtype,
    columns: usize,
    common: f32,
    weights: &'a [u8],
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl Band<'_> {
    fn quantize(self, spec: Spec) -> Result<(), NotFinite> {
        let Band {
            columns,
            common,
            weights,
            codes,
            scales,
            ..
        } = self;
        match (spec, self.dtype) {
            (Spec::Fp8, Dtype::BF16) => fp8::band::<Bf16>(columns, weights, codes, scales),
            (Spec::Fp8, _) => fp8::band::<F32>(columns, weights, codes, scales),
            (Spec::Int4, Dtype::BF16) => int4::band::<Bf16>(weights, codes, scales),
            (Spec::Int4, _) => int4::band::<F32>(weights, codes, scales),
            (Spec::Nvfp4, Dtype::BF16) => nvfp4::band::<Bf16>(common, weights, codes, scales),
            (Spec::Nvfp4, _) => nvfp4::band::<F32>(common, weights, codes, scales),
        }
    }
}

/// At rest. Each byte is set later.
fn room(place: &Place) -> Result<Buffer<u8>, Error> {
    let (dtype, shape) = (place.dtype, place.shape());
    match bytes_of(dtype, &shape) {
        Some(bytes) => Ok(Buffer::at_rest(bytes)),
        None => Err(WrongSize { dtype, shape, bytes: 0 }.into()),
    }
}

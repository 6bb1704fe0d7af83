//! From a sample to its reward.

use super::{
    Cause, Context, Error, Grade, Grader, Named, OpenAi, Operation, Sample, Similarity, formula, python, template,
};
use futures::future::{BoxFuture, try_join_all};
use futures::{FutureExt, TryFutureExt};
use std::collections::BTreeMap;

impl Grader {
    /// An error is no reward of 0: the rollout has none.
    pub async fn grade(&self, context: &Context, sample: &Sample<'_>) -> Result<Grade, Error> {
        match self {
            Grader::Named(grader) => Ok(grader.grade(sample.text, sample.answer).into()),
            Grader::OpenAi(grader) => grader.grade(context, sample).await,
        }
    }
}

impl From<f64> for Grade {
    fn from(reward: f64) -> Self {
        Grade {
            reward,
            ..Grade::default()
        }
    }
}

impl Named {
    fn grade(self, text: &str, answer: &str) -> f64 {
        match self {
            Named::ExactMatch => f64::from(text.trim() == answer.trim()),
            Named::PrefixMatch => {
                let wanted = answer.chars().count();
                if wanted == 0 {
                    return f64::from(text.is_empty());
                }
                let got = text.chars().zip(answer.chars()).take_while(|(t, a)| t == a).count();
                got as f64 / wanted as f64
            }
            Named::Contains => f64::from(text.contains(answer)),
        }
    }
}

impl OpenAi {
    /// Boxed, because a multi grader grades with others.
    fn grade<'a>(&'a self, context: &'a Context, sample: &'a Sample<'a>) -> BoxFuture<'a, Result<Grade, Error>> {
        let fill = |text: &str| template::fill(text, sample);
        match self {
            OpenAi::StringCheck {
                input,
                reference,
                operation,
                ..
            } => {
                let (input, reference) = (fill(input), fill(reference));
                let holds = match operation {
                    Operation::Eq => input == reference,
                    Operation::Ne => input != reference,
                    Operation::Like => input.contains(&reference),
                    Operation::Ilike => input.to_lowercase().contains(&reference.to_lowercase()),
                };
                futures::future::ready(Ok(f64::from(holds).into())).boxed()
            }
            OpenAi::TextSimilarity {
                input,
                reference,
                evaluation_metric: Similarity::FuzzyMatch,
                ..
            } => {
                let (input, reference) = (fill(input), fill(reference));
                context
                    .compute(move || rapidfuzz::fuzz::ratio(input.chars(), reference.chars()))
                    .map_ok(Grade::from)
                    .boxed()
            }
            OpenAi::ScoreModel(grader) => async move { grader.grade(context.judges()?, sample).await }
                .map_ok(Grade::from)
                .boxed(),
            OpenAi::Rubric(grader) => async move { grader.grade(context.judges()?, sample).await }
                .map_ok(Grade::from)
                .boxed(),
            OpenAi::Python { source, .. } => python::grade(source, &context.sandboxes, sample)
                .map_ok(Grade::from)
                .boxed(),
            OpenAi::Multi {
                graders,
                calculate_output,
                ..
            } => async move {
                let graded = graders.iter().map(|(name, grader)| async move {
                    let grade = grader.grade(context, sample).await?;
                    Ok::<_, Error>((name.clone(), grade.reward))
                });
                let parts: BTreeMap<String, f64> = try_join_all(graded).await?.into_iter().collect();
                let rewards: Vec<(&str, f64)> = parts.iter().map(|(name, reward)| (name.as_str(), *reward)).collect();
                let reward = formula(calculate_output, graders)
                    .and_then(|formula| formula.value(&rewards))
                    .map_err(|error| Error::new(Cause::Invalid, format!("calculate_output {error:#}")))?;
                Ok(Grade { reward, parts })
            }
            .boxed(),
        }
    }
}

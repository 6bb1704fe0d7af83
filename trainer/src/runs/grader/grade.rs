//! From a sample to its reward.

use super::{Cause, Context, Error, Grader, Named, OpenAi, Operation, Sample, Similarity, formula, python, template};
use futures::FutureExt;
use futures::future::{BoxFuture, try_join_all};

impl Grader {
    /// The reward, a finite number. An error is no reward of 0: the rollout has none.
    pub async fn grade(&self, context: &Context, sample: &Sample<'_>) -> Result<f64, Error> {
        match self {
            Grader::Named(grader) => Ok(grader.grade(sample.text, sample.answer)),
            Grader::OpenAi(grader) => grader.grade(context, sample).await,
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
    fn grade<'a>(&'a self, context: &'a Context, sample: &'a Sample<'a>) -> BoxFuture<'a, Result<f64, Error>> {
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
                futures::future::ready(Ok(f64::from(holds))).boxed()
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
                    .boxed()
            }
            OpenAi::ScoreModel(grader) => async move { grader.grade(context.judges()?, sample).await }.boxed(),
            OpenAi::Rubric(grader) => async move { grader.grade(context.judges()?, sample).await }.boxed(),
            OpenAi::Python { source, .. } => python::grade(source, &context.sandboxes, sample).boxed(),
            OpenAi::Multi {
                graders,
                calculate_output,
                ..
            } => async move {
                let graded = graders.iter().map(|(name, grader)| async move {
                    let reward = grader.grade(context, sample).await?;
                    Ok::<_, Error>((name.as_str(), reward))
                });
                let rewards: Vec<(&str, f64)> = try_join_all(graded).await?;
                let formula = formula(calculate_output, graders);
                formula
                    .and_then(|formula| formula.value(&rewards))
                    .map_err(|error| Error::new(Cause::Invalid, format!("calculate_output {error:#}")))
            }
            .boxed(),
        }
    }
}
